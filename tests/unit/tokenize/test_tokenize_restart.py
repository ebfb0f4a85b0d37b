"""Work that was interrupted goes on where it was and ends as if it had not been; half-made folders never look whole."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import ConfigError
from trainer.data.shards import TokenPool
from trainer.errors import RunError
from trainer.tokenize import output, work
from trainer.tokenize.command import run_tokenize

SHARE = ("--heldout.fraction", "0.2")
LIMIT_SECONDS = 120


@pytest.fixture
def inputs(tmp_path: Path, write_jsonl: Any) -> Path:
    for number in range(4):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", [f"ba ko ri {number} {n}" for n in range(30)])
    return tmp_path / "in"


def fail_in_task(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The task's work fails once, with its files half written; gives the list of tasks begun."""
    begun: list[int] = []
    run_task = work.run_task

    def run(job: Any, task: Any, on_progress: Any) -> None:
        if task.number == number and number not in begun:
            begun.append(task.number)
            (job.folder / "train" / f"{number:05d}_unshuffled.ds").write_bytes(b"half")
            (job.folder / "heldout" / f"{number:05d}_00000_doc_shuffled.ds").write_bytes(b"half")
            raise RunError("the disk is full")
        begun.append(task.number)
        run_task(job, task, on_progress)

    monkeypatch.setattr(work, "run_task", run)
    return begun


def test_an_interrupted_run_goes_on_to_the_same_files(
    tokenize: Any, inputs: Path, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [inputs, *SHARE, "--num-tasks", "4"]
    assert tokenize(*flags, "--output-dir", tmp_path / "whole").code == 0
    begun = fail_in_task(2, monkeypatch)
    first = tokenize(*flags, "--output-dir", tmp_path / "out")
    assert (first.code, first.err, begun) == (1, "the disk is full\n", [0, 1, 2])
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    second = tokenize(*flags, "--output-dir", tmp_path / "out")
    assert second.code == 0, second.err
    assert "going on with unfinished work: 2 of 4 tasks are done" in second.out
    assert begun == [0, 1, 2, 2, 3]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_unfinished_work_is_no_data(
    tokenize: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_task(2, monkeypatch)
    assert tokenize(inputs, *SHARE, "--num-tasks", "4", "--output-dir", tmp_path / "out").code == 1
    for path in ("train", ".partial/train", ".partial/train/00000_00000_doc_shuffled.ds"):
        with pytest.raises(ConfigError, match="unfinished work of a tokenize; run the same command again"):
            TokenPool([tmp_path / "out" / path])


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--heldout.fraction", "0.3"], "heldout.fraction was 0.2 and is 0.3"),
        (["--no-shuffle", "--seed", "3"], "shuffle was True and is False; seed was 0 and is 3"),
        (["--num-tasks", "3"], "num_tasks was 4 and is 3"),
        (["--text-key", "body"], "text_key was 'text' and is 'body'"),
    ],
)
def test_other_settings_do_not_go_on(
    tokenize: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], changed: str
) -> None:
    fail_in_task(2, monkeypatch)
    base = [inputs, "--output-dir", tmp_path / "out"]
    before = [*SHARE, "--num-tasks", "4"]
    assert tokenize(*base, *before).code == 1
    settings = {SHARE[0]: SHARE[1], "--num-tasks": "4"}
    same = [part for flag, value in settings.items() if flag not in flags for part in (flag, value)]
    answer = tokenize(*base, *same, *flags)
    assert answer.code == 2
    assert f"holds unfinished work with other settings: {changed}. Give the same" in answer.err
    assert tokenize(*base, *before, "--num-workers", "1", "--bad-documents", "drop").code == 0


def test_a_changed_input_does_not_go_on_but_starts_anew(
    tokenize: Any, inputs: Path, documents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_task(2, monkeypatch)
    base = [inputs, *SHARE, "--num-tasks", "4", "--output-dir", tmp_path / "out"]
    assert tokenize(*base).code == 1
    (inputs / "1.jsonl").write_text('{"text": "new"}\n')
    answer = tokenize(*base)
    assert answer.code == 2 and f"input {inputs / '1.jsonl'} was '" in answer.err
    assert tokenize(*base, "--clean").code == 0
    found = documents(tmp_path / "out" / "train") + documents(tmp_path / "out" / "heldout")
    assert len(found) == 91 and found.count("new") == 1


def test_killed_while_moving_into_place(
    tokenize: Any, inputs: Path, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [inputs, *SHARE, "--num-tasks", "4", "--tokenizer.train.vocab-size", "270"]
    assert tokenize(*flags, "--output-dir", tmp_path / "a" / "out").code == 0
    whole = contents(tmp_path / "a" / "out")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "train":
            raise OSError("killed here")
        return rename(path, target)

    for clean in ([], ["--clean"]):
        folder = tmp_path / f"b{len(clean)}" / "out"
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            assert tokenize(*flags, "--output-dir", folder).code == 1
        assert sorted(path.name for path in folder.iterdir()) == [".partial", "heldout", "tokenizer"]
        answer = tokenize(*flags, "--output-dir", folder, *clean)
        assert answer.code == 0, answer.err
        assert ("going on with unfinished work: 4 of 4 tasks are done" in answer.out) is not clean or clean
        assert contents(folder) == whole


def test_finished_work_is_kept_unless_clean_which_deletes_no_more(
    tokenize: Any, inputs: Path, contents: Any, tmp_path: Path
) -> None:
    base = [inputs, "--output-dir", tmp_path / "out"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    assert tokenize(*base, *SHARE).code == 0
    whole = contents(tmp_path / "out")
    answer = tokenize(*base)
    assert answer.code == 2 and "holds the finished work of an earlier tokenize; --clean deletes it" in answer.err
    assert contents(tmp_path / "out") == whole

    (tmp_path / "out" / "train" / "mine.ds").write_text("mine")
    answer = tokenize(*base, "--clean")
    assert answer.code == 2 and f"{tmp_path / 'out' / 'train' / 'mine.ds'} was not made by tokenize" in answer.err
    (tmp_path / "out" / "train" / "mine.ds").unlink()

    assert tokenize(*base, "--clean", "--heldout.fraction", "0").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["notes.md", "tokenize.json", "train"]


def test_a_record_that_names_other_files_deletes_none(tokenize: Any, inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    (folder / "tokenize.json").write_text('{"files": ["../precious", "train/../../precious", "/etc/passwd"]}')
    assert tokenize(inputs, "--output-dir", folder, "--clean").code == 0
    assert (tmp_path / "precious").read_text() == "mine"


def test_folders_of_others_are_not_written_to(tokenize: Any, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    for flags in ([], ["--clean"]):
        answer = tokenize(inputs, "--output-dir", tmp_path / "out", *flags)
        assert answer.code == 2
        assert f"{tmp_path / 'out' / 'train'} exists already and is not of an earlier tokenize" in answer.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_two_at_once_are_refused(tokenize: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LOCK_SECONDS", 0)
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    with (tmp_path / "out" / ".partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = tokenize(inputs, "--output-dir", tmp_path / "out", "--clean")
    assert answer.code == 2 and f"another tokenize is at work in {tmp_path / 'out'}" in answer.err


def test_who_waited_for_the_lock_finds_the_finished_work(
    tokenize: Any, inputs: Path, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is deleted by the one that finishes: who has opened it before must not take it for a lock."""
    folder = tmp_path / "out"
    opened = os.open

    def finish_first(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        handle = opened(path, flags, *arguments, **options)
        if str(path).endswith(".partial/lock"):
            monkeypatch.setattr(os, "open", opened)
            assert tokenize(inputs, "--output-dir", folder).code == 0
        return handle

    monkeypatch.setattr(os, "open", finish_first)
    answer = tokenize(inputs, "--output-dir", folder)
    assert answer.code == 2 and "holds the finished work of an earlier tokenize" in answer.err
    assert not (folder / ".partial").exists()


def test_work_without_results_does_not_bind(tokenize: Any, inputs: Path, contents: Any, tmp_path: Path) -> None:
    """Whoever got the first command line wrong corrects it and goes on, without a deletion to ask for."""
    for name in ("a", "b"):
        folder = tmp_path / name / "out"
        if name == "b":
            answer = tokenize(inputs, "--output-dir", folder, "--text-key", "body")
            assert answer.code == 1 and "has no 'body'; its keys are 'text'" in answer.err
        assert tokenize(inputs, "--output-dir", folder).code == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_file_system_without_locks_is_said(
    tokenize: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    answer = tokenize(inputs, "--output-dir", tmp_path / "out")
    assert answer.code == 0 and f"{tmp_path / 'out'} lies on a file system without locks" in answer.out


def wait_for(what: Any) -> Any:
    end = time.monotonic() + LIMIT_SECONDS
    while not (found := what()):
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_and_kill_leave_no_process_and_lose_no_finished_task(
    tiny_tokenizer: Path, write_jsonl: Any, contents: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    for number in range(16):
        words = generator.integers(0, 10**6, 8000).astype(str).tolist()
        texts = [" ".join(words[at : at + 40]) for at in range(0, 8000, 40)]
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", texts)
    flags = [str(tmp_path / "in"), *SHARE, "--num-tasks", "16", "--tokenizer.name", str(tiny_tokenizer)]
    assert run_tokenize([*flags, "--output-dir", str(tmp_path / "whole")]) == 0
    flags += ["--output-dir", str(tmp_path / "out")]
    done = tmp_path / "out" / ".partial" / "done"
    children: list[int] = []

    def send_when_one_more_is_done(pid: int, number: int) -> None:
        already = len(list(done.glob("*.json")))
        wait_for(lambda: len(list(done.glob("*.json"))) > already)
        children[:] = children_of(pid)
        os.kill(pid, number)

    command = [sys.executable, "-P", "-c", "from trainer.tokenize.command import main; main()"]
    process = subprocess.Popen([*command, *flags, "--num-workers", "2"])
    try:
        send_when_one_more_is_done(process.pid, signal.SIGKILL)
        assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL
    finally:
        process.kill()
    assert len(children) == 2
    wait_for(lambda: not any(is_running(pid) for pid in children))

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send_when_one_more_is_done, os.getpid(), signal.SIGINT)
        assert run_tokenize([*flags, "--num-workers", "2"]) == 130
        sent.result()
    assert len(children) >= 2
    wait_for(lambda: not any(is_running(pid) for pid in children))

    assert not (tmp_path / "out" / "train").exists()
    kept = len(list(done.glob("*.json")))
    assert 2 <= kept < 16
    capfd.readouterr()
    assert run_tokenize(flags) == 0
    out, err = capfd.readouterr()
    assert f"going on with unfinished work: {kept} of 16 tasks are done" in out and not err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
