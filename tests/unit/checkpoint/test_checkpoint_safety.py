"""Loading runs no code from the folder."""

import dataclasses
import os
import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata

from trainer.checkpoint import find_checkpoint
from trainer.checkpoint.safe_reader import DamagedError, read_metadata
from trainer.errors import RunError


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.fixture
def saved(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> Path:
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.wait()
    return tmp_path / "checkpoints" / "step_1"


@pytest.fixture
def edit_metadata(saved: Path, forge: Any) -> Callable[[Callable[[Metadata], None]], None]:
    def change(edit: Callable[[Metadata], None]) -> None:
        metadata = pickle.loads((saved / ".metadata").read_bytes())
        edit(metadata)
        forge(saved, files={".metadata": pickle.dumps(metadata)})

    return change


def test_planted_pickle_is_refused(
    saved: Path, forge: Any, make_checkpointer: Any, tensors_of: Any, tmp_path: Path
) -> None:
    """The library's own reader would run it."""
    target = tmp_path / "planted"
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Payload(target)
    for content in (pickle.dumps(Payload(target)), pickle.dumps(metadata)):
        forge(saved, files={".metadata": content})
        with pytest.raises(RunError) as raised:
            make_checkpointer().load(saved, tensors_of(0))
        assert str(raised.value) == (
            f"checkpoint {saved} cannot be loaded: refused: .metadata names posix.system, which no checkpoint needs"
        )
        with pytest.raises(Exception, match="every checkpoint in"):
            find_checkpoint(tmp_path, None, lambda text: None)
        assert not target.exists()
    pickle.loads(content)
    assert target.exists()  # so the payload works


def test_planted_pickle_in_a_tensor_is_refused(
    saved: Path, forge: Any, edit_metadata: Any, make_checkpointer: Any, tensors_of: Any, tmp_path: Path
) -> None:
    """Tensors are read with weights_only: a shard in torch's zip format whose pickle runs a command."""
    target = tmp_path / "planted"
    shard = BytesIO()
    with zipfile.ZipFile(shard, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(target), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    forge(saved, files={"__0_0.distcp": shard.getvalue()})

    def point_at_it(metadata: Metadata) -> None:
        metadata.storage_data = {
            index: dataclasses.replace(info, offset=0, length=len(shard.getvalue()))
            for index, info in metadata.storage_data.items()
        }

    edit_metadata(point_at_it)
    with pytest.raises(
        RunError, match="cannot be loaded: a file of tensors is damaged, or holds something else than tensors"
    ):
        make_checkpointer().load(saved, tensors_of(0))
    assert not target.exists()
    torch.load(BytesIO(shard.getvalue()), weights_only=False)
    assert target.exists()


def _bytes_entry(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.norm"] = BytesStorageMetadata()


def _point(name: str) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return edit


def _past_the_end(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset += 10**6


def _transformed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


def _drop_storage(metadata: Metadata) -> None:
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.norm"}


def _drop_rows(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks = [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([4, 3]))]


def _shift(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks = [ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([5, 3]))]


def _no_storage(metadata: Metadata) -> None:
    metadata.storage_data = None


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_bytes_entry, "refused: model.norm is not a tensor"),
        (_point("../step_0/__0_0.distcp"), "refused: .metadata points at '../step_0/__0_0.distcp'"),
        (_point("/dev/zero"), "refused: .metadata points at '/dev/zero'"),
        (_point("state.json"), "refused: .metadata points at 'state.json'"),
        (_point("__0_0.distcp\n"), "refused: .metadata points at '__0_0.distcp\\n'"),
        (_point("__7_0.distcp"), "__7_0.distcp is missing"),
        (_past_the_end, "__0_0.distcp is cut short: "),
        (_transformed, "refused: model.weight is stored with ['stream.zstd']"),
        (_drop_storage, ".metadata does not say where model.norm is stored"),
        (_drop_rows, ".metadata leaves part of model.weight out"),
        (_shift, ".metadata places part of model.weight outside of it"),
        (_no_storage, ".metadata is not of the known format"),
    ],
)
def test_metadata_is_checked(saved: Path, edit_metadata: Any, edit: Callable[[Metadata], None], reason: str) -> None:
    edit_metadata(edit)
    with pytest.raises(DamagedError) as raised:
        read_metadata(saved)
    assert str(raised.value).startswith(reason)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "hub"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("pathlib", "Path"),
        ("torch.serialization", "load"),
    ],
)
def test_only_the_formats_classes_are_known(tmp_path: Path, module: str, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(DamagedError, match=rf"refused: .metadata names {module}\.{name}, which no checkpoint needs"):
        read_metadata(tmp_path)


def test_another_object_is_not_metadata(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DamagedError, match=r"is not of the known format \(holds a dict\)"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("extra", [(), ((3, 1),)])
def test_properties_of_every_supported_torch(
    saved: Path, forge: Any, monkeypatch: pytest.MonkeyPatch, extra: Any
) -> None:
    """torch 2.15 pickles one property more than 2.11; each must read what the other wrote."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    get_state = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*get_state(self)[:5], *extra))
        content = pickle.dumps(_unpickled(saved))
    forge(saved, files={".metadata": content})
    entry = read_metadata(saved).state_dict_metadata["model.norm"]
    assert entry.properties.dtype == torch.bfloat16


def _unpickled(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())
