"""A stub model with exact document isolation, and helpers to build validations of hand-made shards."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.base import CausalLM, LossOutput
from models.batch import IGNORE_INDEX, Batch
from trainer.parallel.mesh import Mesh, one_rank_mesh


class StubLM(CausalLM):
    """Logits from the mean of the segment's embeddings so far: any leak between segments changes them."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(vocab_size, 8, generator=generator, dtype=torch.float64).to(dtype))
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, batch: Batch, loss_scale: torch.Tensor | None = None, greedy: bool = False) -> LossOutput:
        self.shapes.add(tuple(batch.input_ids.shape))
        hidden = torch.empty(batch.num_tokens, 8, dtype=self.embedding.dtype)
        embedded = self.embedding[batch.input_ids.flatten()]
        ends = batch.segments.host_cu_seqlens.tolist()
        for start, end in pairwise(ends):
            hidden[start:end] = embedded[start:end].cumsum(0) / torch.arange(1, end - start + 1)[:, None]
        logits, labels = hidden @ self.embedding.T, batch.labels.flatten()
        losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        nats = losses.detach().reshape(batch.labels.shape)
        hits = (logits.argmax(-1) == labels).reshape(batch.labels.shape) if greedy else None
        return LossOutput(loss=losses.sum(), nats=nats, greedy_hits=hits)

    def document_nats(self, input_ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The same for one segment alone, in float64."""
        table = self.embedding.detach().double().numpy()
        hidden = np.cumsum(table[input_ids], axis=0) / np.arange(1, len(input_ids) + 1)[:, None]
        logits = hidden @ table.T
        return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]


@pytest.fixture
def stub_model() -> Callable[..., StubLM]:
    return lambda vocab_size=384, dtype=torch.float32: StubLM(vocab_size, dtype)


@pytest.fixture
def make_mesh() -> Callable[..., Mesh]:
    """The mesh of one of `dp_size` ranks, without a process group."""

    def make(dp_rank: int = 0, dp_size: int = 1) -> Mesh:
        return replace(one_rank_mesh(torch.device("cpu")), dp_rank=dp_rank, dp_size=dp_size)

    return make


@pytest.fixture
def write_shard(tmp_path: Path, write_shard: Callable[..., Path]) -> Callable[..., Path]:
    """Writes documents of token ids as one shard; returns its folder."""

    def write(documents: list[list[int]], name: str = "set", loss: list[int] | None = None) -> Path:
        return write_shard(tmp_path / name / "00000_00000_doc_shuffled.ds", documents, loss=loss).parent

    return write
