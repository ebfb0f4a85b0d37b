"""The fingerprint of a base: the same for the same weights however they are stored, another for any others."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.weights.fingerprint import fingerprint
from trainer.weights.folder import open_weights


def write(folder: Path, tensors: dict[str, Tensor]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return fingerprint(open_weights(folder))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"a": (40, 6), "b": (3, 4, 6), "c": (9,), "d": (1, 2), "e": (0, 3), "f": ()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.arange(12, dtype=torch.float32).view(4, 3), "x.bias": torch.arange(4.0)}
    assert write(tmp_path / "pinned", tensors) == "a03b8e5690e8d27a"


def test_any_change_shows(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    def bf16(name: str) -> dict[str, Tensor]:
        return tensors | {name: tensors[name].bfloat16()}

    def with_value(name: str, *place: int) -> dict[str, Tensor]:
        changed = tensors[name].clone()
        changed[place] += 1
        return tensors | {name: changed}

    others = [
        with_value("a", 0, 0),
        with_value("a", 39, 5),
        with_value("b", 1, 2, 3),
        with_value("c", 8),
        with_value("d", 0, 1),
        with_value("f"),
        bf16("c"),
        tensors | {"e": torch.empty(0, 4)},
        tensors | {"d": tensors["d"].view(2, 1)},
        {("z" if name == "d" else name): tensor for name, tensor in tensors.items()},
    ]
    found = [write(tmp_path / str(number), other) for number, other in enumerate([tensors, *others])]
    assert len(set(found)) == len(found)
    assert write(tmp_path / "same", dict(reversed(tensors.items()))) == found[0]


def test_files_do_not_matter(tmp_path: Path, base_folder: Path) -> None:
    whole = {name: tensor for path in base_folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert len(list(base_folder.glob("*.safetensors"))) > 1
    assert write(tmp_path / "whole", whole) == fingerprint(open_weights(base_folder))
