"""Whether a checkpoint holds what is to be loaded from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.checkpoint.manifest import read_checkpoint
from trainer.checkpoint.safe_reader import DamagedError
from trainer.errors import RunError
from trainer.text import listed


def check_fits(path: Path, tensors: Mapping[str, Tensor], ignore: tuple[str, ...] = ()) -> tuple[int, Metadata]:
    """See whether a checkpoint could be loaded, without reading tensors.

    Args:
        tensors: as in `Checkpointer.load`; they may lie on the meta device.
        ignore: names with these beginnings may be in the checkpoint only.

    Returns:
        its step, and where each of its tensors lies.

    Raises:
        RunError: it is damaged or not safe, or names, shapes or dtypes differ.
    """
    try:
        manifest, metadata = read_checkpoint(path)
    except DamagedError as error:
        raise RunError(f"checkpoint {path} cannot be loaded: {error}") from error
    stored = metadata.state_dict_metadata
    differences = [
        *_list("missing in the checkpoint", [name for name in tensors if name not in stored]),
        *_list(
            "in the checkpoint only", [name for name in stored if name not in tensors and not name.startswith(ignore)]
        ),
        *_list("different", [text for name in tensors if (text := _difference(name, tensors[name], stored))]),
    ]
    if differences:
        raise RunError(f"checkpoint {path} does not fit this run: {'; '.join(differences)}")
    return int(manifest["step"]), metadata


def _difference(name: str, tensor: Tensor, stored: Mapping[str, Any]) -> str | None:
    entry = stored.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None  # missing: listed as that
    saved, wanted = (tuple(entry.size), entry.properties.dtype), (tuple(tensor.shape), tensor.dtype)
    if saved == wanted:
        return None
    return f"{name} is {saved[0]} {_dtype(saved[1])}, this run has {wanted[0]} {_dtype(wanted[1])}"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _list(kind: str, names: list[str]) -> list[str]:
    return [f"{kind}: {listed(names)}"] if names else []
