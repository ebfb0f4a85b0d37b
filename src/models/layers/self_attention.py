"""The attention layer of our blocks, and the context of a batch that blocks read."""

import torch
from torch import Tensor, nn

from models.batch import Batch
from models.layers.attention import AttentionForm, DocumentContext, attend
from models.layers.context_parallel.base import ContextParallel
from models.layers.norm import RMSNorm
from models.layers.rope import Rope, apply_rope, rope_table


class SequenceContext(DocumentContext):
    """What every block of ours reads of a batch besides the hidden states: document borders and RoPE table.

    Document borders are those of the whole rows, the table that of this rank's positions.
    """

    def __init__(
        self, batch: Batch, *, attn: str, rope: Rope, dtype: torch.dtype, parallel: ContextParallel | None = None
    ) -> None:
        """
        Args:
            batch: whole rows, on the device of the model.
            attn: "sdpa" or "varlen".
            rope: what the table is made of.
            dtype: of the hidden states.
            parallel: this rank's part in the ranks that share the rows; None: they are this rank's alone.

        Raises:
            ValueError: `attn` cannot run on this device or dtype.
        """
        super().__init__(batch, attn=attn, dtype=dtype)
        phase_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.parallel = parallel
        if parallel is not None and parallel.has_own_attention:
            self.form = AttentionForm.OWN
        position_ids = batch.position_ids if parallel is None else parallel.share(batch.position_ids)
        self.cos, self.sin = rope_table(position_ids, rope, phase_dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention inside documents; see models.layers.attention.attend.

        Args:
            query: (rows, positions, heads, head_dim), of this rank's positions.
            key: (rows, positions, kv heads, head_dim), likewise.
            value: likewise.

        Returns:
            (rows, positions, heads, head_dim)
        """
        if self.parallel is None:
            return attend(query, key, value, self)
        return self.parallel.attend(query, key, value, self)


class Attention(nn.Module):
    """Multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245), with or without RoPE."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        rotate: bool,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            hidden_size: width of the hidden states.
            num_heads: query heads, a multiple of num_kv_heads.
            num_kv_heads: key and value heads.
            head_dim: width of a head; num_heads * head_dim need not be hidden_size.
            qkv_bias: biases on the query, key and value projections.
            output_bias: a bias on the output projection.
            qk_norm_eps: RMSNorm of queries and keys over the head dimension, before RoPE; None: no norm.
            rotate: apply RoPE to queries and keys.
            dtype: of the parameters.
        """
        super().__init__()
        self.head_dim = head_dim
        self.rotate = rotate
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, dtype=dtype)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias, dtype=dtype)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, positions, hidden_size) -> the same."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(heads)
        key = self.k_proj(hidden).view(heads)
        value = self.v_proj(hidden).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotate:
            query = apply_rope(query, context.cos, context.sin)
            key = apply_rope(key, context.cos, context.sin)
        return self.o_proj(context.attend(query, key, value).flatten(2))
