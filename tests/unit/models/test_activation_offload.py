"""Activations kept in host memory: the same gradients, and little on the device. The device here is the CPU, where the
copies are plain ones; tests/gpu/test_memory_levers_gpu.py has streams and the allocator's count."""

import torch

from models.layers import offload

NUM_BLOCKS = 5


def gradients(model, batch) -> dict[str, torch.Tensor]:
    """Of two micro-batches added up."""
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        model(batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def offloaded(model, max_inflight: int, monkeypatch) -> list[int]:
    """Switch it on; gives the sizes of the host buffers as they are made."""
    monkeypatch.setattr(offload, "MIN_BYTES", 64)
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN until it is written

    model.offload_activations(max_inflight=max_inflight, device=torch.device("cpu"), allocate=allocate)
    return sizes


def test_gradients_are_equal_bit_for_bit(make_model, make_batch, monkeypatch):
    """Without and with full checkpointing, of every block and of every second one; two micro-batches each."""
    batch = make_batch([[5, 11], [9, 7]])
    for freq in (0, 1, 2):
        plain, moved = (make_model(num_hidden_layers=NUM_BLOCKS) for _ in range(2))
        for model in (plain, moved):
            if freq:
                model.apply_activation_checkpointing("full", freq)
        sizes = offloaded(moved, 1, monkeypatch)
        expected, found = gradients(plain, batch), gradients(moved, batch)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        hidden = 2 * 16 * 32 * 4
        # The last blocks, max_inflight and the running one, stay; the second micro-batch needs no new buffers.
        if freq == 1:
            assert sizes == [hidden] * (NUM_BLOCKS - 2)
        else:
            assert len(sizes) > NUM_BLOCKS


def test_no_more_blocks_than_asked_for_are_on_the_device(make_model, make_batch, monkeypatch):
    """At the end of the forward pass the running block and max_inflight others, and so in the backward pass."""
    model = make_model(num_hidden_layers=NUM_BLOCKS)
    offloaded(model, 2, monkeypatch)
    shared = model.block_runners[0]._offload
    loss = model(make_batch([[16]])).loss
    blocks = dict(shared._blocks)

    def on_device() -> list[int]:
        return [i for i, block in blocks.items() if any(slot.on_device is not None for slot in block.slots.values())]

    assert on_device() == [2, 3, 4]
    seen = []
    fetch = shared._fetch

    def watch(block) -> None:
        fetch(block)
        seen.append(max(on_device()) - min(on_device()) + 1)

    monkeypatch.setattr(shared, "_fetch", watch)
    loss.backward()
    assert max(seen) == 3
    assert on_device() == []


def test_parameters_and_what_all_blocks_read_stay(make_model, make_batch, monkeypatch):
    model = make_model(num_hidden_layers=3)
    offloaded(model, 1, monkeypatch)
    model(make_batch([[16]]))
    shared = model.block_runners[0]._offload
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for block in shared._blocks.values():
        assert block.slots
        assert not parameters & set(block.slots)


def test_no_hooks_without_gradients(make_model, make_batch, monkeypatch):
    """A validation leaves nothing behind."""
    model = make_model(num_hidden_layers=3)
    sizes = offloaded(model, 1, monkeypatch)
    with torch.no_grad():
        model(make_batch([[16]]))
    assert sizes == []
    assert model.block_runners[0]._offload._blocks == {}


def test_small_storages_stay(make_model, make_batch, monkeypatch):
    """A copy of its own costs more than their memory."""
    for least in (64, 3000):
        model = make_model(num_hidden_layers=3)
        sizes = offloaded(model, 1, monkeypatch)
        monkeypatch.setattr(offload, "MIN_BYTES", least)
        model(make_batch([[16]]))
        assert min(sizes) >= least
        assert (min(sizes) < 3000) == (least == 64)
