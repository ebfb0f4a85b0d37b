"""Peak memory of one rank's GPU, from sizes alone.

A step is walked through by its moments of most memory: in the head, in the backward pass of the last block and of the
first, at the embedding, in the optimizer. What is there at all of them (weights, optimizer state) is exact; what blocks
keep and need is measured on the meta device (trainer.memory.block); the head's part follows from its chunks.
"""

from dataclasses import dataclass

from configs.model import ModelConfig
from models.base import CausalLM
from models.layers.lm_head import chunk_size
from trainer.memory.block import BlockMemory, measure_block
from trainer.model_setup import DTYPES
from trainer.optim.offloaded_adamw import NUM_SLOTS, PIECE_ELEMENTS

WORKSPACE = 2 * 32 * 2**20
"""What matrix products keep for themselves: one buffer each of the forward and of the backward thread."""


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """What one rank computes, and with how many others."""

    rows: int
    """Of a micro-batch."""

    seq_len: int
    grad_accum_steps: int
    world_size: int = 1
    dp_replicate: int = 1

    @property
    def shards(self) -> int:
        """Ranks over which the weights lie."""
        return self.world_size // self.dp_replicate


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank's GPU at the moment of a step with the most."""

    moment: str
    parts: dict[str, int]
    """Of that moment, by name."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        """A table for people."""
        rows = [(name, size) for name, size in self.parts.items() if size]
        width = max(len(name) for name, _ in rows)
        unit, size_of_unit = ("GiB", 2**30) if self.total >= 2**30 else ("MiB", 2**20)
        return [
            f"memory: about {self.total / size_of_unit:.1f} {unit} on each GPU, most of it {self.moment}",
            *(f"memory:   {name:<{width}}  {size / size_of_unit:8.2f} {unit}" for name, size in rows),
        ]


def estimate_memory(config: ModelConfig, model: CausalLM, shape: RankShape) -> MemoryEstimate:
    """The estimate of a training run.

    Args:
        config: of the model.
        model: as `preflight` builds it, on the meta device, adapters included. It is changed: build one for this.
        shape: of the rank's work.
    """
    return _Step(config, model, shape).peak()


class _Step:
    """The sizes of a step."""

    def __init__(self, config: ModelConfig, model: CausalLM, shape: RankShape) -> None:
        self.config, self.shape = config, shape
        self.compute, self.master = (
            DTYPES[name].itemsize for name in (config.resolved_compute_dtype, config.optimization_dtype)
        )
        # Sums of gradients: over micro-batches at one rank in fp32 at least, as FSDP leaves them above.
        self.is_sharded = shape.world_size > 1
        self.sum = self.master if self.is_sharded else max(self.master, 4)
        self.reduce = DTYPES[config.resolved_reduce_dtype].itemsize
        parameters = list(model.parameters())
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)
        self.frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        self.largest = max((p.numel() for p in parameters if p.requires_grad), default=0)
        self.blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        head = model.vocabulary_matrices[-1]
        self.vocab_size, self.width = head.shape
        self.trains_head, self.is_tied = head.requires_grad, len(model.vocabulary_matrices) == 1
        self.trains_table = model.vocabulary_matrices[0].requires_grad
        self.tokens = shape.rows * shape.seq_len // config.cp
        self.memory = self._measure(model)

    def _measure(self, model: CausalLM) -> list[BlockMemory]:
        """Of every block; alike ones are measured once."""
        config = self.config
        model.to(DTYPES[config.resolved_compute_dtype])
        if config.ac is not None:
            model.apply_activation_checkpointing(config.ac.mode, config.ac.freq)
        found: dict[object, BlockMemory] = {}
        memory = []
        for index, block in enumerate(model.blocks):
            shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
            kind = (shapes, config.ac is not None and index % config.ac.freq == 0)
            if kind not in found:
                found[kind] = measure_block(
                    model,
                    index,
                    rows=self.shape.rows,
                    seq_len=self.shape.seq_len // config.cp,
                    compiled=config.compile is not None,
                )
            memory.append(found[kind])
        return memory

    def peak(self) -> MemoryEstimate:
        moments = [
            ("in the head", self._in_head()),
            ("in the backward pass of the last block", self._in_last_block()),
            ("in the backward pass of the first block", self._in_first_block()),
            ("at the end of the backward pass", self._at_embedding()),
            ("in the optimizer", self._in_optimizer()),
        ]
        estimates = [MemoryEstimate(moment=moment, parts=self._fixed() | parts) for moment, parts in moments]
        return max(estimates, key=lambda estimate: estimate.total)

    def _fixed(self) -> dict[str, int]:
        """What is there at every moment."""
        config, shards = self.config, self.shape.shards
        on_gpu = 0 if config.fsdp_cpu_offload and self.is_sharded else 1
        copies = self.trained * self.compute if not self.is_sharded and self.compute != self.master else 0
        moments = 2 * self.trained * self.master // shards
        if config.optim_cpu_offload:
            moments = NUM_SLOTS * 2 * min(PIECE_ELEMENTS, self.largest // shards) * self.master
        return {
            "master weights": on_gpu * self.trained * self.master // shards,
            "their copies for computing": copies,
            "frozen weights": on_gpu * self.frozen * self.compute // shards,
            "optimizer moments": on_gpu * moments,
            "batch, tables, workspaces": self.tokens * 32 + self.memory[0].context + WORKSPACE,
        }

    def _gathered(self, num_blocks: int) -> int:
        """Weights that FSDP holds whole: those outside of blocks always, of the blocks so many of the largest."""
        if not self.is_sharded:
            return 0
        deferred = self.config.defer_grad_sync and self.shape.grad_accum_steps > 1
        every = deferred or not self.config.reshard_after_forward
        blocks = sum(self.blocks) if every else num_blocks * max(self.blocks)
        return (self.trained + self.frozen - sum(self.blocks) + blocks) * self.compute

    def _sums(self, *, done: float) -> int:
        """Sums of gradients when a share `done` of the parameters have had their first."""
        share = 1 if self.shape.grad_accum_steps > 1 else done
        on_gpu = 0 if self.config.fsdp_cpu_offload and self.is_sharded else 1
        sums = on_gpu * self.trained * self.sum // self.shape.shards
        if self.is_sharded and self.shape.grad_accum_steps > 1:
            if self.config.defer_grad_sync:
                sums += self.trained * self.reduce
            elif self.config.defer_replicate_sync:
                sums += self.trained * self.reduce // self.shape.shards
        return int(share * sums)

    def _saved(self) -> int:
        """Activations of all blocks at the end of the forward pass."""
        offloading = self.config.ac_offloading
        there = self.memory if offloading is None else self.memory[-offloading.max_inflight_activations - 1 :]
        return sum(block.saved for block in there)

    @property
    def _hidden(self) -> int:
        """Hidden states of a micro-batch."""
        return self.tokens * self.width * self.compute

    @property
    def _head_gradient(self) -> int:
        """Gradient of the head's weight in the compute dtype."""
        return self.vocab_size * self.width * self.compute if self.trains_head else 0

    def _in_head(self) -> dict[str, int]:
        wide = max(self.compute, 4)
        chunk = min(chunk_size(self.vocab_size), self.tokens) * self.vocab_size
        logits = chunk * (wide + (self.compute if self.compute < wide else 0))
        weight = self._head_gradient * wide // self.compute
        # Forward: a chunk's logits beside the gradients. Then the weight's gradient is rounded; backward: scaled.
        forward = self._hidden + weight + max(logits, self._head_gradient)
        backward = 2 * (self._hidden + self._head_gradient)
        return {
            "gradients": self._sums(done=0),
            "gathered weights": self._gathered(1),
            "activations": self._saved() + 2 * self._hidden,
            "logits and gradients of the head": max(forward, backward),
        }

    def _in_last_block(self) -> dict[str, int]:
        held = self._head_gradient if self.is_tied else 0
        done = 0.0 if self.is_tied else self.vocab_size * self.width / self.trained
        return {
            "gradients": self._sums(done=done) + held,
            "gathered weights": self._gathered(2),
            "activations": self._saved() + self._hidden,
            "backward pass of a block": self.memory[-1].backward + self._hidden,
        }

    def _in_first_block(self) -> dict[str, int]:
        """And in any other, since they are alike: with recomputation the weights' gradients outweigh what is freed.
        Of offloaded activations those of the next blocks are back by then."""
        block = max(self.memory, key=lambda memory: memory.saved + memory.backward)
        saved = block.saved if self.config.ac_offloading is None else self._saved()
        table = self.vocab_size * self.width if self.trains_table else 0
        return {
            "gradients": self._sums(done=1 - table / self.trained) + (self._head_gradient if self.is_tied else 0),
            "gathered weights": self._gathered(2) + self._reduced(),
            "activations": saved + self._hidden,
            "backward pass of a block": block.backward + self._hidden,
        }

    def _reduced(self) -> int:
        """Gradients of a block on their way to their sum over ranks."""
        return max(self.blocks) * self.reduce if self.is_sharded else 0

    def _at_embedding(self) -> dict[str, int]:
        table = self.vocab_size * self.width * self.compute if self.trains_table else 0
        return {
            "gradients": self._sums(done=1) + (self._head_gradient if self.is_tied else 0) + table,
            "gathered weights": self._gathered(1) + self._reduced(),
            "activations": self._hidden,
        }

    def _in_optimizer(self) -> dict[str, int]:
        shards = self.shape.shards
        # A gradient in another dtype than its master is rounded first, of all parameters at once.
        rounds = self.master < self.sum and not self.config.optim_cpu_offload
        rounded = self.trained * self.master // shards if rounds else 0
        return {"gradients": self._sums(done=1) + rounded, "gathered weights": self._gathered(0)}
