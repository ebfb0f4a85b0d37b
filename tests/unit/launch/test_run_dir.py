"""The run directory: names, who may use it, what clean deletes."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.attempts import share
from trainer.errors import RunError
from trainer.run_dir import check_run_dir, fill_run_name, open_run_dir, write_dry_run


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SFTConfig]:
    def build(**values: Any) -> SFTConfig:
        base = {"data": {"type": "fake"}, "output_dir": tmp_path / "outputs", "run": {"name": "one"}}
        return SFTConfig.model_validate(base | values)

    return build


def _open_and_close(config: SFTConfig) -> int:
    attempt = open_run_dir(config, print)
    attempt.close()
    return attempt.number


@pytest.mark.parametrize(
    ("data", "model", "start"),
    [
        ({"type": "fake"}, {"arch": {"model_type": "llama"}}, "fake--llama--"),
        ({"type": "tokens", "paths": ["data/my shards/", "other"]}, {"name": "org/Tiny-1.5"}, "my-shards--Tiny-1.5--"),
        ({"type": "tokens", "paths": ["data/.hidden"]}, {"arch": {"model_type": "qwen3"}}, "hidden--qwen3--"),
        ({"type": "none"}, {"name": "org/Tiny-1.5"}, "val--Tiny-1.5--"),
        ({"type": "sft", "name": "org/Some-Chats"}, {"name": "org/Tiny-1.5"}, "Some-Chats--Tiny-1.5--"),
        (
            {"type": "sft", "name": "../data/my chats.jsonl"},
            {"arch": {"model_type": "qwen3"}},
            "my-chats.jsonl--qwen3--",
        ),
    ],
)
def test_name_is_data_model_and_eight_hex_digits(
    make: Callable[..., SFTConfig], data: dict[str, Any], model: dict[str, Any], start: str
) -> None:
    config = make(data=data, model=model, run={})
    named = fill_run_name(config)
    assert named.run.name is not None and re.fullmatch(re.escape(start) + "[0-9a-f]{8}", named.run.name)
    assert config.run.name is None
    assert fill_run_name(config).run.name != named.run.name
    assert SFTConfig.model_validate_json(named.model_dump_json()) == named


def test_a_given_name_stays(make: Callable[..., SFTConfig]) -> None:
    config = make()
    assert fill_run_name(config) is config


def test_attempt_lays_out_configs_and_logs(make: Callable[..., SFTConfig]) -> None:
    config = make(max_steps=3)
    check_run_dir(config)
    assert _open_and_close(config) == 0
    run_dir = config.output_dir / "one"
    assert SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text()) == config
    assert SFTConfig.model_validate_json((run_dir / "configs" / "attempt_0" / "sft.json").read_text()) == config
    assert (run_dir / "logs" / "latest").readlink() == Path("attempt_0")


def test_a_used_directory_is_refused_unless_resuming(make: Callable[..., SFTConfig]) -> None:
    config, resuming = make(), make(resume={}, max_steps=9)
    _open_and_close(config)
    for refuse in (check_run_dir, _open_and_close):
        with pytest.raises(ConfigError, match=r"run.name: .*one is not empty"):
            refuse(config)
    check_run_dir(resuming)
    assert _open_and_close(resuming) == 1
    run_dir = config.output_dir / "one"
    assert (run_dir / "logs" / "latest").readlink() == Path("attempt_1")
    assert SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text()) == resuming
    assert SFTConfig.model_validate_json((run_dir / "configs" / "attempt_0" / "sft.json").read_text()) == config


def test_a_fork_wants_an_empty_directory(make: Callable[..., SFTConfig]) -> None:
    _open_and_close(make())
    fork = make(resume={"dir": make().output_dir / "one"}, run={"name": "two"})
    check_run_dir(fork)
    _open_and_close(fork)
    with pytest.raises(ConfigError, match="two is not empty"):
        check_run_dir(fork)
    check_run_dir(make(resume={"dir": make().output_dir / "one"}))  # another way to say: this run's own


def test_a_directory_of_others_is_refused(make: Callable[..., SFTConfig]) -> None:
    config = make()
    folder = config.output_dir / "one"
    folder.mkdir(parents=True)
    check_run_dir(config)
    (folder / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        check_run_dir(config)


def test_a_file_in_the_way_is_named(make: Callable[..., SFTConfig]) -> None:
    config = make()
    config.output_dir.touch()
    with pytest.raises(ConfigError, match=r"output_dir: .*outputs is not a folder"):
        check_run_dir(config)


@contextmanager
def _read_only(path: Path) -> Iterator[None]:
    """Nobody may write `path`: by its mode, or for root, whom modes do not stop, by making it immutable."""
    if os.geteuid() != 0:
        mode = path.stat().st_mode
        path.chmod(mode & 0o555)
    elif subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode:
        pytest.skip("root needs a file system with immutable files")
    try:
        yield
    finally:
        if os.geteuid() != 0:
            path.chmod(mode)
        else:
            subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("place", ["", "one", "one/configs", "one/configs/sft.json", "one/logs", "one/metrics.jsonl"])
def test_a_place_that_cannot_be_written_is_named(make: Callable[..., SFTConfig], place: str) -> None:
    """A read-only output_dir, or an earlier run's files of somebody else."""
    first, resuming = make(), make(resume={})
    _open_and_close(first)
    (first.output_dir / "one" / "metrics.jsonl").touch()
    new = make(run={"name": "two"})
    path = first.output_dir / place
    with _read_only(path), pytest.raises(ConfigError) as error:
        check_run_dir(resuming if place else new)
    (fault,) = error.value.faults
    assert (fault.key, fault.message.partition(" cannot be written: ")[0]) == ("output_dir", str(path))
    check_run_dir(resuming)
    check_run_dir(new)


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (errno.EROFS, ConfigError, r"output_dir: .*: Read-only file system$"),
        (errno.EACCES, ConfigError, r"output_dir: .*: Permission denied$"),
        (errno.ENOSPC, RunError, r"^the run directory .*one cannot be used: .*: No space left on device$"),
    ],
)
def test_what_the_kernel_did_not_foresee_is_named(
    make: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], text: str
) -> None:
    """File servers know rights of their own, which `access` does not."""

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    for write in (_open_and_close, write_dry_run):
        with pytest.raises(error, match=text):
            write(make())


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (
            errno.EWOULDBLOCK,
            ConfigError,
            r"in use by a run .*\(process 1 on elsewhere\); if elsewhere is down for good",
        ),
        (errno.ENOLCK, None, ""),
        (errno.EIO, RunError, "cannot be used: .*Input/output error"),
    ],
)
def test_locks_over_a_network(
    make: Callable[..., SFTConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    error: type[Exception] | None,
    text: str,
) -> None:
    """A lock that a dead machine left with the file server, a file system without locks, and one in trouble."""
    _open_and_close(make())
    config = make(resume={})
    lock = config.output_dir / "one" / ".lock"
    lock.write_text("process 1 on elsewhere\n")

    def flock(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    if error is None:
        check_run_dir(config)
        assert _open_and_close(config) == 1
        assert "lies on a file system without locks" in capsys.readouterr().out
        return
    for use in (check_run_dir, _open_and_close):
        with pytest.raises(error, match=text):
            use(config)


def test_a_killed_clean_can_be_done_again(make: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows that the folder is a run of ours goes last."""
    _open_and_close(make())
    remove = shutil.rmtree

    def remove_and_die(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", remove_and_die)
    with pytest.raises(KeyboardInterrupt):
        _open_and_close(make(clean=True))
    monkeypatch.undo()
    assert _open_and_close(make(clean=True)) == 0


def test_clean_deletes_the_run_and_nothing_behind_its_links(make: Callable[..., SFTConfig], tmp_path: Path) -> None:
    config = make()
    _open_and_close(config)
    run_dir = config.output_dir / "one"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "weights").write_text("years of work")
    (run_dir / "checkpoints").symlink_to(precious)
    (run_dir / "metrics.jsonl").touch()
    (config.output_dir / "two").mkdir()
    clean = make(clean=True)
    check_run_dir(clean)
    assert (run_dir / "metrics.jsonl").exists()  # checking deletes nothing
    assert _open_and_close(clean) == 0
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "configs", "logs"]
    assert (precious / "weights").read_text() == "years of work"
    assert (config.output_dir / "two").exists()


def test_clean_refuses_a_folder_that_is_no_run(make: Callable[..., SFTConfig]) -> None:
    clean = make(clean=True)
    folder = clean.output_dir / "one"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "sft.py").write_text("source")
    for refuse in (check_run_dir, _open_and_close):
        with pytest.raises(ConfigError, match=r"clean: .*not a run of ours"):
            refuse(clean)
    assert (folder / "configs" / "sft.py").exists()


def test_clean_refuses_a_link_out_of_output_dir(make: Callable[..., SFTConfig], tmp_path: Path) -> None:
    elsewhere = make(output_dir=tmp_path / "elsewhere")
    _open_and_close(elsewhere)
    clean = make(clean=True)
    clean.output_dir.mkdir()
    (clean.output_dir / "one").symlink_to(elsewhere.output_dir / "one")
    with pytest.raises(ConfigError, match=r"clean: .*is a link to"):
        _open_and_close(clean)
    assert (elsewhere.output_dir / "one" / "logs" / "attempt_0").exists()


def test_clean_works_where_output_dir_itself_is_a_link(make: Callable[..., SFTConfig], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    _open_and_close(make())
    assert _open_and_close(make(clean=True)) == 0


@pytest.mark.parametrize("name", ["..", ".", "../one", "a/b", "", "/tmp"])
def test_names_that_lead_elsewhere_are_refused(make: Callable[..., SFTConfig], name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        make(run={"name": name})


def test_a_living_run_keeps_others_out(make: Callable[..., SFTConfig]) -> None:
    config, others = make(), [make(resume={}), make(clean=True)]
    attempt = open_run_dir(config, print)
    for other in others:
        for refuse in (check_run_dir, _open_and_close):
            with pytest.raises(ConfigError, match=r"run.name: .*one is in use by a run .*\(process \d+ on .+\)"):
                refuse(other)
    attempt.close()
    for other in others:
        check_run_dir(other)


def test_a_living_worker_keeps_others_out_when_its_launcher_is_gone(make: Callable[..., SFTConfig]) -> None:
    config = make()
    attempt = open_run_dir(config, print)
    held = share(attempt.dir)
    attempt.close()
    with pytest.raises(ConfigError, match="in use"):
        check_run_dir(make(clean=True))
    held.close()
    check_run_dir(make(clean=True))


def test_a_dry_run_leaves_room_for_the_run(make: Callable[..., SFTConfig]) -> None:
    dry = make(dry_run=True)
    path = write_dry_run(dry)
    assert path == dry.output_dir / "one" / "configs" / "sft.json"
    assert SFTConfig.model_validate_json(path.read_text()) == dry
    check_run_dir(dry)
    assert _open_and_close(make()) == 0


def test_a_dry_run_beside_attempts_leaves_their_record_alone(make: Callable[..., SFTConfig]) -> None:
    first = make(max_steps=1)
    _open_and_close(first)
    run_dir = first.output_dir / "one"
    dry = make(dry_run=True, resume={}, max_steps=2)
    assert write_dry_run(dry) == run_dir / "configs" / "dry_run" / "sft.json"
    assert SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text()) == first
    assert _open_and_close(make(resume={})) == 1


def test_scoring_a_run_leaves_its_config_alone(make: Callable[..., SFTConfig]) -> None:
    first, scoring = make(max_steps=9), make(max_steps=0, resume={})
    _open_and_close(first)
    run_dir = first.output_dir / "one"
    assert _open_and_close(scoring) == 1
    assert SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text()) == first
    assert SFTConfig.model_validate_json((run_dir / "configs" / "attempt_1" / "sft.json").read_text()) == scoring


def test_scoring_into_a_directory_of_its_own_records_its_config(make: Callable[..., SFTConfig]) -> None:
    scoring = make(max_steps=0)
    write_dry_run(make(max_steps=9))
    _open_and_close(scoring)
    path = scoring.output_dir / "one" / "configs" / "sft.json"
    assert SFTConfig.model_validate_json(path.read_text()) == scoring


def test_scoring_a_living_run_says_where_else_it_can_be_done(make: Callable[..., SFTConfig]) -> None:
    attempt = open_run_dir(make(), print)
    with pytest.raises(ConfigError, match=r"in use by a run .*; its checkpoints can be scored meanwhile: give "):
        check_run_dir(make(max_steps=0, resume={}))
    attempt.close()
