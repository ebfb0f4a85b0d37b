"""A causal language model of transformers as a CausalLM: its decoder as it is, our attention, our head and loss."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from models.base import CausalLM, InitRule, LossOutput
from models.batch import Batch
from models.counts import MatrixShapes
from models.errors import ArchError, one_line
from models.hf.attention import ATTENTION_NAME, AttentionCall, Trace, register_attention
from models.hf.buffers import buffer_values, freeze_rope, restore_buffers
from models.hf.names import head_name_in_files
from models.hf.refusals import refuse_model
from models.layers.attention import DocumentContext, check_attention
from models.layers.block import BlockRunner
from models.layers.lm_head import LMHead


def transformers_model(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model with its first weights, on the current default device. No code but transformers' runs.

    Args:
        config: of the model.
        attention: name of an attention function that transformers knows.
        dtype: of the parameters.

    Raises:
        ArchError: transformers cannot build it.
    """
    # The padding id changes nothing here: padding is a document of its own, without loss. With it an embedding would
    # get no gradient for that id (often the id of EOS), and some models look for it in the batch.
    config = copy.deepcopy(config)
    config.pad_token_id = None
    try:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
        )
    except Exception as error:  # a model's constructor raises whatever it stumbles over
        raise ArchError("", f"transformers cannot build this {config.model_type}: {one_line(error)}") from error


class TransformersForCausalLM(CausalLM):
    """transformers' decoder with our attention, head and loss. Parameter names are those of transformers."""

    impl = "hf"

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        seq_len: int,
        attn: str,
        dtype: torch.dtype,
        first_values: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            config: of a causal language model of transformers that models.hf.refusals has nothing against.
            seq_len: longest row.
            attn: "sdpa" or "varlen".
            dtype: of the parameters.
            first_values: of vectors by name, for `init_rules`; None where there is no rule.

        Raises:
            ArchError: the model cannot be computed exactly inside documents, as far as its modules show.
        """
        super().__init__()
        register_attention()
        model = transformers_model(config, attention=ATTENTION_NAME, dtype=dtype)
        refuse_model(model, config, seq_len=seq_len)
        self.config = config
        self.attn = attn
        self._first_values = first_values
        self._buffer_values = buffer_values(model)
        self._compiled = self._fullgraph = False
        self._take_apart(model, dtype)
        self._blocks_path = self._find_blocks()
        freeze_rope(self)
        calls = self._trace()
        self._check_calls(calls, seq_len)
        self._attention_width = sum(call.num_heads * call.head_dim for call in calls)
        for block in self.blocks:
            block.runner = block.forward = BlockRunner(block.forward)  # type: ignore[assignment]
        self.train()

    def _take_apart(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Keep the decoder under its name, and put our head in the place of transformers'."""
        family = self.config.model_type
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if type(head) is not nn.Linear or head.bias is not None or not isinstance(embedding, nn.Embedding):
            raise ArchError("model_type", f"{family} has a head or an embedding of a kind that is not implemented")
        children = dict(model.named_children())
        base_name = model.base_model_prefix
        head_names = [name for name, child in children.items() if child is head]
        if set(children) != {base_name, *head_names} or len(head_names) != 1 or hasattr(CausalLM, base_name):
            raise ArchError("model_type", f"{family} has parts besides decoder and head: not implemented")
        if not head.out_features == embedding.num_embeddings == self.config.vocab_size:
            raise ArchError("vocab_size", f"embedding and head of {family} differ in their number of ids")
        tied = head.weight is embedding.weight
        # The head has the name that it has in files.
        self._base_name, self._head_name = base_name, head_name_in_files(model, head_names[0])
        self._their_head_name = head_names[0]
        self.add_module(base_name, children[base_name])
        options: dict[str, Any] = {"tied": tied, "dtype": dtype, "logit_scale": _logit_scale(self.config)}
        self.add_module(self._head_name, LMHead(head.in_features, head.out_features, **options))
        self._embedding_name = next(name for name, module in self.named_modules() if module is embedding)
        self._tied = tied
        self._hidden_size = head.in_features
        unique = sum(1 for _ in self.named_parameters())
        if unique != sum(1 for _ in self.named_parameters(remove_duplicate=False)):
            raise ArchError("model_type", f"{family} shares parameters between its layers: not implemented")

    def _find_blocks(self) -> str:
        number = self.config.num_hidden_layers
        modules = self._base.named_modules()
        found = [name for name, module in modules if isinstance(module, nn.ModuleList) and len(module) == number]
        if len(found) != 1:
            raise ArchError("model_type", f"the layers of {self.config.model_type} are not found")
        return found[0]

    def _trace(self) -> list[AttentionCall]:
        """What the attention layers ask for, from a forward pass without values. One that looks at values fails here:
        it would make the host wait for the GPU in every step."""
        trace = Trace()
        ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
        shadow = copy.deepcopy(self._base).to("meta")
        try:
            with torch.device("meta"), torch.no_grad():
                shadow(input_ids=ids, position_ids=ids, use_cache=False, documents=trace)
        except Exception as error:  # whatever a model's code stumbles over
            raise ArchError(
                "model_type", f"{self.config.model_type} cannot be computed inside documents: {one_line(error)}"
            ) from error
        return trace.calls

    def _check_calls(self, calls: list[AttentionCall], seq_len: int) -> None:
        family, number = self.config.model_type, self.config.num_hidden_layers
        if len(calls) != number or len({id(call.module) for call in calls}) != number:
            raise ArchError(
                "model_type",
                f"the {number} layers of {family} call transformers' attention interface {len(calls)} times, not once "
                "each: not all of it could be kept inside documents",
            )
        for call in calls:
            if call.sliding_window is not None and call.sliding_window < seq_len:
                window = call.sliding_window
                raise ArchError("sliding_window", f"{window} is shorter than seq_len = {seq_len}: not implemented")
            check_attention(self.attn, call.head_dim)

    def own_name(self, name: str) -> str:
        """The name here of a parameter of transformers' model."""
        return f"{self._head_name}.weight" if name == f"{self._their_head_name}.weight" else name

    @property
    def _base(self) -> nn.Module:
        return self.get_submodule(self._base_name)

    @property
    def _head(self) -> LMHead:
        head = self.get_submodule(self._head_name)
        assert isinstance(head, LMHead)
        return head

    @property
    def _embedding_weight(self) -> Tensor:
        # Read at each use: FSDP swaps the parameter object between its sharded and its gathered form.
        return self.get_submodule(self._embedding_name).weight  # type: ignore[return-value]

    @property
    def _tied_weight(self) -> Tensor | None:
        return self._embedding_weight if self._tied else None

    def _hidden(self, batch: Batch) -> Tensor:
        documents = DocumentContext(batch, attn=self.attn, dtype=self._embedding_weight.dtype)
        if self._compiled:
            documents.prepare_compiled(self._fullgraph)
        output = self._base(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, documents=documents
        )
        return output.last_hidden_state

    def forward(self, batch: Batch, loss_scale: Tensor | None = None, greedy: bool = False) -> LossOutput:
        """Loss of one micro-batch; see CausalLM.forward."""
        loss, nats, hits = self._head(self._hidden(batch), batch.labels, loss_scale, greedy, self._tied_weight)
        return LossOutput(loss=loss, nats=nats, greedy_hits=hits)

    def logits(self, batch: Batch) -> Tensor:
        """(rows, seq_len, vocab_size) in fp32 (fp64 in float64 runs)."""
        return self._head.logits(self._hidden(batch), self._tied_weight)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """As torch's, and the buffers get their values again."""
        super().to_empty(device=device, recurse=recurse)
        restore_buffers(self, self._buffer_values, torch.device(device))
        return self

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder layers in order."""
        return list(self._base.get_submodule(self._blocks_path).children())

    def compile_blocks(self, mode: str, fullgraph: bool) -> None:
        """Compile each layer; see CausalLM.compile_blocks."""
        super().compile_blocks(mode, fullgraph)
        self._compiled, self._fullgraph = True, fullgraph

    @property
    def vocabulary_matrices(self) -> Sequence[Tensor]:
        """Embedding table, and the head's weight unless tied."""
        head = self._head.weight
        return [self._embedding_weight] if head is None else [self._embedding_weight, head]

    @property
    def tied_names(self) -> dict[str, str]:
        """A tied head is the embedding."""
        return {f"{self._head_name}.weight": f"{self._embedding_name}.weight"} if self._tied else {}

    @property
    def matrix_shapes(self) -> MatrixShapes:
        """Matrices of the layers, and the head."""
        return MatrixShapes(
            block_params=sum(p.numel() for block in self.blocks for p in block.parameters() if p.dim() == 2),
            head_params=self.config.vocab_size * self._hidden_size,
            attention_width=self._attention_width,
        )

    def init_rules(self) -> dict[str, InitRule]:
        """Vectors begin with the number that they begin with in transformers: 1 for most norm gains.

        Raises:
            ArchError: one does not begin with a number.
        """
        rules: dict[str, InitRule] = {}
        for name, value in self._first_values.items():
            if value is None:
                raise ArchError(
                    "model_type", f"{self.config.model_type} draws {name} in a way that [model.init] does not"
                )
            rules[name] = partial(_constant, value=value)
        return rules


def _constant(generator: np.random.Generator, count: int, value: float) -> np.ndarray:
    return np.full(count, value, np.float32)


def _logit_scale(config: PretrainedConfig) -> float:
    """Factor of the logits: granite divides by one, cohere multiplies with one. models.hf.proof holds it against
    transformers' logits, so a field of another meaning does not pass."""
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    return float(factor or 1.0) / float(divisor or 1.0)
