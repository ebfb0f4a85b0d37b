"""The dense decoder in Hugging Face's layout and parameter names: llama, mistral, qwen2, qwen3, smollm3.

One implementation serves all of them: they differ in what `models.dense.layout` lists.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from models.base import CausalLM, LossOutput
from models.batch import Batch
from models.counts import MatrixShapes
from models.dense.checks import refuse_unsupported
from models.dense.layout import DenseLayout, dense_layout
from models.errors import ArchError
from models.layers.block import DecoderBlock
from models.layers.context_parallel.base import ContextParallel, CpStyle
from models.layers.context_parallel.ulysses import heads_fit
from models.layers.lm_head import LMHead
from models.layers.mlp import SwiGLU
from models.layers.norm import RMSNorm
from models.layers.rope import Rope
from models.layers.rope_config import rope_of_config
from models.layers.self_attention import Attention, SequenceContext


class DenseBlock(DecoderBlock):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: PretrainedConfig, layout: DenseLayout, *, rotate: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=layout.head_dim,
            qkv_bias=layout.qkv_bias,
            output_bias=layout.output_bias,
            qk_norm_eps=config.rms_norm_eps if layout.qk_norm else None,
            rotate=rotate,
            dtype=dtype,
        )
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, layout.mlp_bias, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def body(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, positions, hidden_size) -> the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DenseDecoder(nn.Module):
    """Embedding, blocks, final norm: the `model.` of the parameter names."""

    def __init__(
        self, config: PretrainedConfig, layout: DenseLayout, *, rope: Rope, attn: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attn = attn
        self.rope = rope
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            DenseBlock(config, layout, rotate=rotate, dtype=dtype) for rotate in layout.rope_layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.parallel: ContextParallel | None = None
        self.compiled: bool = False
        self.fullgraph: bool = False

    def forward(self, batch: Batch) -> Tensor:
        """(rows, positions, hidden_size) final hidden states of this rank's positions: all, or its share."""
        input_ids = batch.input_ids if self.parallel is None else self.parallel.share(batch.input_ids)
        hidden = self.embed_tokens(input_ids)
        context = SequenceContext(batch, attn=self.attn, rope=self.rope, dtype=hidden.dtype, parallel=self.parallel)
        if self.compiled:
            context.prepare_compiled(self.fullgraph)
        for block in self.layers:
            hidden = block(hidden, context)
        return self.norm(hidden)


class DenseForCausalLM(CausalLM):
    """The dense decoder with its head and loss."""

    def __init__(self, config: PretrainedConfig, *, seq_len: int, attn: str, dtype: torch.dtype) -> None:
        """
        Args:
            config: of a model type that models.registry gives to this family.
            seq_len: longest row, for checks only.
            attn: "sdpa" or "varlen".
            dtype: of the parameters; the computation has the dtype that they have when forward runs.

        Raises:
            ArchError: the config asks for what is not implemented here.
        """
        super().__init__()
        layout = dense_layout(config)
        refuse_unsupported(config, seq_len=seq_len, attn=attn, head_dim=layout.head_dim)
        self.config = config
        self.layout = layout
        rope = rope_of_config(config, layout.head_dim)
        self.model = DenseDecoder(config, layout, rope=rope, attn=attn, dtype=dtype)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=config.tie_word_embeddings, dtype=dtype)

    def forward(self, batch: Batch, loss_scale: Tensor | None = None, greedy: bool = False) -> LossOutput:
        """Loss of one micro-batch; see CausalLM.forward."""
        hidden, parallel = self.model(batch), self.model.parallel
        labels = batch.labels if parallel is None else parallel.share(batch.labels)
        loss, nats, hits = self.lm_head(hidden, labels, loss_scale, greedy, self._tied_weight)
        if parallel is not None:
            nats, hits = parallel.place(nats), None if hits is None else parallel.place(hits)
        return LossOutput(loss=loss, nats=nats, greedy_hits=hits)

    def logits(self, batch: Batch) -> Tensor:
        """(rows, seq_len, vocab_size) in fp32 (fp64 in float64 runs)."""
        logits = self.lm_head.logits(self.model(batch), self._tied_weight)
        return logits if self.model.parallel is None else self.model.parallel.place(logits)

    def check_context_parallel(self, style: CpStyle, size: int) -> None:
        """Attention by heads needs heads for every rank; see CausalLM.check_context_parallel."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        if style == "ulysses" and not heads_fit(heads, kv_heads, size):
            fitting = [str(ranks) for ranks in range(2, heads + 1) if heads_fit(heads, kv_heads, ranks)]
            working = f"; {', '.join(fitting)} would work" if fitting else ""
            raise ArchError(
                "num_attention_heads",
                f"{heads} query heads and {kv_heads} key-value heads cannot be shared by {size} ranks{working}, and "
                "ring attention takes any number",
            )

    def share_rows(self, parallel: ContextParallel) -> None:
        """Take a share of every row from now on; see CausalLM.share_rows."""
        self.model.parallel = parallel

    @property
    def _tied_weight(self) -> Tensor | None:
        # Read at each use: FSDP swaps the parameter object between its sharded and its gathered form.
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else None

    @property
    def blocks(self) -> Sequence[DecoderBlock]:
        """The decoder blocks in order."""
        return [block for block in self.model.layers if isinstance(block, DecoderBlock)]

    @property
    def vocabulary_matrices(self) -> Sequence[Tensor]:
        """Embedding table, and the head's weight unless tied."""
        head = self.lm_head.weight
        return [self.model.embed_tokens.weight] if head is None else [self.model.embed_tokens.weight, head]

    @property
    def tied_names(self) -> dict[str, str]:
        """A tied head is the embedding."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    @property
    def matrix_shapes(self) -> MatrixShapes:
        """Projections of attention and feed-forward, and the head."""
        config = self.config
        return MatrixShapes(
            block_params=sum(p.numel() for block in self.blocks for p in block.parameters() if p.dim() == 2),
            head_params=config.vocab_size * config.hidden_size,
            attention_width=config.num_hidden_layers * config.num_attention_heads * self.layout.head_dim,
        )

    def compile_blocks(self, mode: str, fullgraph: bool) -> None:
        """Compile each block; see CausalLM.compile_blocks."""
        super().compile_blocks(mode, fullgraph)
        self.model.compiled, self.model.fullgraph = True, fullgraph
