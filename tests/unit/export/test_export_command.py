"""The command line of `export-hf`: what it finds, what it refuses, what it replaces."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint.manifest import STATE_NAME, file_records, read_manifest, write_manifest
from trainer.export.command import run_export


@pytest.fixture(scope="module")
def trained(train_run: Callable[..., Path]) -> Path:
    return train_run("plain", arch={"num_hidden_layers": 1})


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(trained, tmp_path / "run")


def export(*argv: object) -> int:
    return run_export([str(argument) for argument in argv])


def error(capsys: pytest.CaptureFixture[str], *argv: object, code: int) -> str:
    """What the command says on its way out."""
    capsys.readouterr()
    assert export(*argv) == code
    return capsys.readouterr().err.rstrip("\n")


def step_of(folder: Path) -> int:
    return json.loads((folder / "oneloop.json").read_text())["step"]


def test_what_a_checkpoint_may_be(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (given, step) in enumerate(
        [
            ([run_dir], 4),
            ([run_dir / "checkpoints"], 4),
            ([run_dir, "--step", 2], 2),
            ([run_dir / "checkpoints" / "step_2"], 2),
        ]
    ):
        assert export(*given, "--output-dir", tmp_path / str(number)) == 0
        assert step_of(tmp_path / str(number)) == step
    (run_dir / "checkpoints" / "step_4" / ".metadata").unlink()
    capsys.readouterr()
    assert export(run_dir) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"checkpoint {run_dir / 'checkpoints' / 'step_4'} is damaged and passed over: .metadata is missing"
    assert out[-1] == f"written: {run_dir / 'exports' / 'step_2'}"
    assert step_of(run_dir / "exports" / "step_2") == 2


@pytest.mark.parametrize(("here", "given"), [("step_2", "."), (".", "step_2"), ("..", "checkpoints/step_2")])
def test_the_run_is_found_from_within(run_dir: Path, monkeypatch: pytest.MonkeyPatch, here: str, given: str) -> None:
    """An export into the checkpoint would make it one that holds foreign files."""
    checkpoint = run_dir / "checkpoints" / "step_2"
    before = sorted(path.name for path in checkpoint.iterdir())
    monkeypatch.chdir(run_dir / "checkpoints" / here)
    assert export(given) == 0
    assert step_of(run_dir / "exports" / "step_2") == 2
    assert sorted(path.name for path in checkpoint.iterdir()) == before


def test_a_checkpoint_moved_out_of_its_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints" / "step_4").rename(tmp_path / "best")
    assert error(capsys, tmp_path / "best", code=2) == (
        f"output_dir: is needed: {tmp_path / 'best'} lies in no run directory, where exports go by default"
    )
    assert export(tmp_path / "best", "--output-dir", tmp_path / "hf") == 0
    assert step_of(tmp_path / "hf") == 4


def test_faults_of_the_command_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_dir / "checkpoints" / "step_4"
    nowhere, empty, exported = tmp_path / "nowhere", tmp_path / "empty", tmp_path / "weights" / "step_4"
    empty.mkdir()
    exported.mkdir(parents=True)
    (exported / "oneloop.json").write_text("{}")
    (tmp_path / "link").symlink_to(empty)
    for argv, message in (
        ([nowhere], f"checkpoint (flag --checkpoint): {nowhere} does not exist"),
        ([checkpoint / "state.json"], f"checkpoint (flag --checkpoint): {checkpoint / 'state.json'} is not a folder"),
        (
            [empty],
            f"checkpoint (flag --checkpoint): {empty} is neither a checkpoint (it has no state.json) nor a run with a "
            "folder checkpoints",
        ),
        (
            [exported],
            f"checkpoint (flag --checkpoint): {exported} is an export already, a Hugging Face folder, and no "
            "checkpoint",
        ),
        ([run_dir, checkpoint], f"stray argument '{checkpoint}': '{run_dir}' is the one checkpoint already"),
        (
            [run_dir, "--step", 3],
            f"step (flag --step): there is no step_3 in {run_dir / 'checkpoints'}; there are step_2, step_4",
        ),
        (
            [checkpoint, "--step", 4],
            f"step (flag --step): {checkpoint} is a checkpoint already; give --step with a run directory",
        ),
        (
            [run_dir, "--max-shard-size", "much"],
            "max_shard_size (flag --max-shard-size): 'much' is no size; write a number of at least 1 and a unit: 5GB, "
            "500MB, 2GiB",
        ),
        (
            [run_dir, "--output-dir", tmp_path / "link"],
            f"output_dir (flag --output-dir): {tmp_path / 'link'} is a link",
        ),
        (
            [run_dir, "--output-dir", tmp_path / ("x" * 300)],
            f"output_dir (flag --output-dir): {tmp_path / ('x' * 300)} cannot be used: File name too long",
        ),
        (
            [run_dir, "--tokenizer.name", nowhere],
            f"tokenizer.name (flag --tokenizer.name): there is no folder {nowhere}",
        ),
    ):
        assert error(capsys, *argv, code=2) == message
    assert not (run_dir / "exports").exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("100", 100), ("2kb", 2000)])
def test_sizes(tmp_path: Path, text: str, size: int) -> None:
    from configs.export import ExportConfig

    assert ExportConfig(checkpoint=tmp_path, max_shard_size=text).max_shard_bytes == size


def test_only_exports_are_replaced(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    arguments = [run_dir, "--output-dir", out]
    assert error(capsys, *arguments, code=2).endswith(f"{out} is not empty: give another, or --clean to replace it")
    assert error(capsys, *arguments, "--clean", code=2) == (
        f"clean (flag --clean): {out} holds no oneloop.json, so it is not an export of ours: not replaced"
    )
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()
    assert export(*arguments, "--step", 2) == 0
    assert "is not empty" in error(capsys, *arguments, code=2)
    assert step_of(out) == 2
    assert export(*arguments, "--clean") == 0
    assert step_of(out) == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tokenizer_of_the_run_has_moved(
    run_dir: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "checkpoints" / "step_4"
    manifest = read_manifest(path)
    gone = {"tokenizer": "./gone"}
    state = manifest["state"] | {"model": manifest["state"]["model"] | gone}
    write_manifest(path, step=4, state=state, files=file_records(manifest))
    assert error(capsys, run_dir, code=2) == (
        "tokenizer.name: there is no folder ./gone (it is that of the run; --tokenizer.name says where it lies now)"
    )
    assert export(run_dir, "--tokenizer.name", tiny_tokenizer) == 0
    small = {"config": manifest["state"]["model"]["config"] | {"vocab_size": 200}}
    state["model"] |= small
    write_manifest(path, step=4, state=state, files=file_records(manifest))
    assert error(capsys, run_dir, "--clean", "--tokenizer.name", tiny_tokenizer, code=2).endswith(
        f"{tiny_tokenizer} has 300 ids, the model only 200: it is another model's"
    )


def test_a_run_without_tokenizer(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "checkpoints" / "step_4"
    manifest = read_manifest(path)
    state = manifest["state"] | {"model": manifest["state"]["model"] | {"tokenizer": None}}
    write_manifest(path, step=4, state=state, files=file_records(manifest))
    assert export(run_dir) == 0
    assert "the run had no tokenizer, so none is written; --tokenizer.name adds one" in capsys.readouterr().out
    assert not (run_dir / "exports" / "step_4" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (None, "state.json does not say which model it is of: written by another version, or by a test"),
        ({"config": {}, "tokenizer": None, "compute_dtype": "float32"}, "state.json describes its model in an unknown"),
        (
            {"config": {"model_type": "llama"}, "tokenizer": None, "compute_dtype": "int8"},
            "dtype int8 is not one of bfloat16, float16, float32",
        ),
    ],
)
def test_a_checkpoint_that_does_not_say_its_model(
    run_dir: Path, capsys: pytest.CaptureFixture[str], model: object, reason: str
) -> None:
    path = run_dir / "checkpoints" / "step_4"
    manifest = read_manifest(path)
    write_manifest(path, step=4, state=manifest["state"] | {"model": model}, files=file_records(manifest))
    assert error(capsys, run_dir, code=1).startswith(f"checkpoint {path} cannot be exported: {reason}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_may_not_be_written(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "Permission denied" in error(capsys, run_dir, "--output-dir", closed / "hf", code=1)


def test_an_output_below_a_file(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_dir / "metrics.jsonl" / "hf"
    assert error(capsys, run_dir, "--output-dir", out, code=1) == (
        f"{out} could not be written: File exists: {run_dir / 'metrics.jsonl'}"
    )


def test_the_manifest_is_not_enough(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint folder whose state.json is gone is named as damaged, not as unknown."""
    path = run_dir / "checkpoints" / "step_4"
    (path / STATE_NAME).unlink()
    assert error(capsys, path, code=1) == f"checkpoint {path} cannot be exported: state.json is missing"
