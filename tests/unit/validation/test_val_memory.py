"""What a round of validation keeps in memory, counted tensor by tensor."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from configs.validation import ValConfig
from models.batch import IGNORE_INDEX
from models.init import init_weights
from models.layers.lm_head import linear_cross_entropy
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.tokenizer import load_tokenizer
from trainer.validation import build_validation

ARCH = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that operations made and somebody still holds, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def test_the_meter_itself() -> None:
    with LiveMemory() as memory:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b[:10] * 2
    assert (memory.peak, memory.live) == (8000, 4040)
    del b, c


def test_ten_times_the_batches_need_no_more_memory(
    write_shard: Callable[..., Path], tiny_tokenizer: Path, make_mesh: Callable[..., Any]
) -> None:
    """Field case R118: no logits, losses or batches of earlier forward passes are kept; a training step fits after it.

    The GPU's allocator says the same in tests/gpu/test_memory_gpu.py.
    """
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    model = build_model(
        build_config(ARCH, tokenizer_length=300, special_ids={}), seq_len=32, attn="sdpa", dtype=torch.float32
    )
    init_weights({name: p.detach() for name, p in model.named_parameters()}, std=0.1, seed=0, rules=model.init_rules())
    rows = Rows.empty(1, 32)
    rows.input_ids[:], rows.labels[:], rows.segment_lengths[:] = 40, 41, [np.array([32])]

    def step_peak() -> int:
        """Of a training step, over what is live already."""
        with LiveMemory() as memory:
            model(collate(rows, full_rows=False, pin_memory=False)).loss.backward()
            model.zero_grad()
        return memory.peak

    step_peak()  # what is made once
    alone = step_peak()
    peaks, left, passes = [], [], []
    for count in (10, 100):
        folder = write_shard([[*range(40, 71), 0]] * count, f"{count}_documents")
        config = ValConfig.model_validate(
            {"interval": 1, "sets": [{"name": "set", "path": folder}], "seq_lens": [32], "micro_batch_tokens": 32}
        )
        validation = build_validation(
            config,
            tokenizer=tokenizer,
            vocab_size=384,
            mesh=make_mesh(),
            pin_memory=False,
            cache_dir=Path("unused"),
        )
        assert validation is not None
        done: list[tuple[int, int]] = []
        with LiveMemory() as memory:
            validation.run(model, lambda *progress, done=done: done.append(progress))
            left.append(memory.live)
        peaks.append(memory.peak)
        passes.append(len(done))
        assert step_peak() == alone
    assert passes == [10, 100]
    assert peaks[0] == peaks[1]
    assert left[0] == left[1]
    logits = 32 * 384 * 4
    assert logits < peaks[0] < 20 * logits


def test_the_head_needs_a_quarter_of_the_plain_memory() -> None:
    """Field case R93, in small: 1024 tokens, 8k ids, peak with chunks at most 1/4 of the naive one, same gradients.

    In full size without numbers in tests/unit/models/test_lm_head.py, on a GPU in tests/gpu/test_model_gpu.py.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 8, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(8192, 8, generator=generator)).requires_grad_()
    labels = torch.randint(0, 8192, (1024,), generator=generator)
    labels[::5] = IGNORE_INDEX
    peaks, gradients = [], []
    for chunked in (False, True):
        with LiveMemory() as memory:
            if chunked:
                loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=128)[0]
            else:
                loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
            gradients.append(torch.autograd.grad(loss, (hidden, weight)))
        peaks.append(memory.peak)
    assert peaks[1] <= peaks[0] / 4, peaks
    for plain, ours in zip(*gradients, strict=True):
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


def test_the_plain_head_is_what_it_is_said_to_be() -> None:
    """The comparison above is with all logits at once, in fp32: the meter must have seen them."""
    with LiveMemory() as memory:
        torch.nn.functional.cross_entropy(torch.zeros(64, 100), torch.zeros(64, dtype=torch.int64))
    assert memory.peak >= 64 * 100 * 4
    assert memory.live == pytest.approx(0, abs=64)
