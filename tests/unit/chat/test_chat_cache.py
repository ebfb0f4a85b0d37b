"""The cache of tokenised conversations: right, found by what changes it, made once, whole or not there."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import LossMaskConfig, SFTDataConfig
from configs.errors import ConfigError
from configs.renderer import RendererConfig
from trainer.data import cache_folder
from trainer.data.cache_folder import CacheFolder
from trainer.data.chat.build import ChatTools, build_chats
from trainer.data.chat.cache import cache as cache_module
from trainer.data.chat.cache import files as cache_files
from trainer.data.chat.cache import pool as tokenise_pool
from trainer.data.chat.cache.cache import SampleCache, open_or_build
from trainer.data.chat.cache.tokenise import Tokeniser, Work
from trainer.data.chat.read.conversation import LossRules
from trainer.data.chat.read.parts import open_parts
from trainer.data.drops import Drop
from trainer.data.errors import PlacedError
from trainer.data.row import untracked
from trainer.errors import RunError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
_LIMIT = 60.0
"""Seconds that nothing here comes near to, unless it hangs."""


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "caches"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(*texts: str) -> dict[str, Any]:
    """User and assistant in turns."""
    return {"messages": [turn(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]}


def chats(count: int) -> list[dict[str, Any]]:
    return [
        chat(f"say {number}", f"{number} is said " * (1 + number % 7), "and?", "no more") for number in range(count)
    ]


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_cache(
    path: Path,
    tokenizer: Any,
    cache_dir: Path,
    *,
    workers: int = 1,
    track: Callable[[str, int, int], None] = untracked,
    template: Path | None = None,
    **options: Any,
) -> SampleCache:
    config = SFTDataConfig(name=str(path), **options)
    (part,) = open_parts(config)
    work = Work(
        part=part,
        tokenizer=tokenizer,
        renderer=RendererConfig(template=template),
        rules=LossRules.of(config),
        key="data",
    )
    return open_or_build(work, cache_dir=cache_dir, workers=workers, track=track)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def never(what: str, done: int, total: int) -> None:
    raise AssertionError(f"work was done: {what}")


def test_samples_and_counts(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    """Field case R47: the largest id and its place are known when the model is not."""
    rows = [
        chat("a", "b c"),
        {"messages": []},
        chat("x <|im_end|> <|im_start|>y", "z"),
        {"messages": []},
        {"messages": [turn("user", "no answer")]},
        chat("a", "b c, and much more than the others say"),
    ]
    told: list[tuple[str, int, int]] = []
    path = write(tmp_path / "chats.jsonl", rows)
    cache = open_cache(path, tokenizer, cache_dir, track=lambda *now: told.append(now))
    assert cache.record.num_samples == 3
    assert cache.rows.tolist() == [0, 2, 5]
    for number, row in enumerate(cache.rows.tolist()):
        sample = cache.read(number)
        assert len(sample.input_ids) == cache.lengths[number]
        assert np.count_nonzero(sample.loss) == cache.loss_tokens[number]
        answer = rows[row]["messages"][1]["content"]
        assert tokenizer.decode(sample.input_ids[sample.loss]) == f"{answer}<|im_end|>"
        if row != 2:
            expected = tokenizer.apply_chat_template(rows[row]["messages"], tokenize=True, return_dict=True)
            assert sample.input_ids.tolist() == expected["input_ids"]
    spelled = cache.read(1)
    assert tokenizer.decode(spelled.input_ids) == tokenizer.apply_chat_template(rows[2]["messages"], tokenize=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert np.count_nonzero(spelled.input_ids == end) == 2
    counts = cache.record
    assert counts.num_rows == 6
    assert [drop.count for drop in counts.dropped.values()] == [2, 1]
    assert [drop.first_place for drop in counts.dropped.values()] == [f"{path}, line 2", f"{path}, line 5"]
    assert counts.split_control_tokens == 2
    assert (counts.tokens, counts.loss_tokens) == (cache.lengths.sum(), cache.loss_tokens.sum())
    assert (counts.longest, counts.longest_place) == (cache.lengths[2], f"{path}, line 6")
    assert (cache.record.max_id, cache.record.max_id_place) == (end, f"{path}, line 1")
    assert told == [(f"tokenising {path}", 0, 6), (f"tokenising {path}", 6, 6)]


def found(cache_dir: Path) -> list[Path]:
    """The caches that are there; nothing else is, hidden or not."""
    folders = sorted(cache_dir.iterdir())
    assert [folder for folder in folders if folder.name.startswith(".")] == []
    return folders


def test_the_cache_is_found_again_and_nothing_is_copied(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats(20))
    first = open_cache(path, tokenizer, cache_dir)
    second = open_cache(path, tokenizer, cache_dir, track=never)
    assert first.record.digest == second.record.digest
    assert len(found(cache_dir)) == 1
    sample = second.read(7)
    for array in (sample.input_ids, sample.loss, second.lengths, second.loss_tokens, second.rows):
        assert not array.flags.owndata and not array.flags.writeable


def test_samples_of_several_record_batches(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "chats.jsonl", chats(30))
    whole = open_cache(path, tokenizer, cache_dir / "whole")
    monkeypatch.setattr(cache_files, "_BATCH_TOKENS", 100)
    monkeypatch.setattr(tokenise_pool, "_ROWS", 3)
    parts = open_cache(path, tokenizer, cache_dir / "parts")
    assert len(parts._batches) > 5
    assert parts.record.digest == whole.record.digest
    for number in range(30):
        one, other = whole.read(number), parts.read(number)
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss.tolist() == other.loss.tolist()


def test_what_changes_the_tokens_changes_the_cache(
    tokenizer: Any, tiny_tokenizer: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Field case R44: other tokenizer, template, loss rules or data: other caches, nothing of the old one is used."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny_tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    other.chat_template = CHATML
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.replace("\\n", "\n").replace("message.role }}", "message.role | upper }}"))
    path = write(tmp_path / "chats.jsonl", chats(3))
    variants: list[tuple[Any, dict[str, Any]]] = [
        (tokenizer, {}),
        (other, {}),
        (tokenizer, {"template": template}),
        (tokenizer, {"loss_mask": LossMaskConfig(user=True, assistant=False)}),
        (tokenizer, {"last_turn_only": True}),
    ]
    caches = [open_cache(path, one, cache_dir, **options) for one, options in variants]
    assert len(found(cache_dir)) == 5
    assert len({cache.record.digest for cache in caches}) == 5
    for cache, (one, options) in zip(caches, variants, strict=True):
        assert open_cache(path, one, cache_dir, track=never, **options).record.digest == cache.record.digest
    write(path, chats(4))
    assert open_cache(path, tokenizer, cache_dir).record.num_samples == 4
    assert len(found(cache_dir)) == 6


def test_what_does_not_change_the_tokens_does_not(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats(3))
    open_cache(path, tokenizer, cache_dir)
    open_cache(path, tokenizer, cache_dir, track=never, seq_len=7, packing="none", overflow="drop", seed=3)


def test_nothing_left_to_train_on_is_a_cache_too(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [{"messages": []}] * 3)
    for track in (untracked, never):
        cache = open_cache(path, tokenizer, cache_dir, track=track)
        assert (cache.record.num_samples, cache.record.max_id, cache.record.max_id_place) == (0, -1, "")
        assert (cache.record.tokens, cache.record.longest, cache.record.longest_place) == (0, 0, "")
        assert list(cache.record.dropped.values()) == [Drop(count=3, first_place=f"{path}, line 1")]
        assert cache.lengths.tolist() == []


def test_a_part_without_rows_is_named(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n  \n")
    with pytest.raises(ConfigError, match=rf"data.name: {path} holds no rows"):
        open_cache(path, tokenizer, cache_dir)
    assert list(cache_dir.iterdir()) == []


def test_the_log_says_how_loss_is_found(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SFTDataConfig(name=str(write(tmp_path / "chats.jsonl", chats(2))))
    tools = ChatTools(tokenizer=tokenizer, renderer=RendererConfig(), cache_dir=cache_dir, track=untracked)
    caplog.set_level(logging.INFO)
    build_chats(config, tools, vocab_size=10**6)
    assert caplog.messages == ["template of data: loss by the template's own marks"]


def test_the_files_do_not_depend_on_workers(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*chats(50), {"messages": []}, *chats(11)]
    path = write(tmp_path / "chats.jsonl", rows)
    monkeypatch.setattr(tokenise_pool, "_ROWS", 4)
    open_cache(path, tokenizer, cache_dir / "alone")
    monkeypatch.setattr(tokenise_pool, "_ALONE_SECONDS", 0.0)
    done: list[int] = []
    open_cache(path, tokenizer, cache_dir / "two", workers=2, track=lambda what, now, total: done.append(now))
    assert done == [0, *range(4, 62, 4), 62]
    (alone,), (two,) = found(cache_dir / "alone"), found(cache_dir / "two")
    assert alone.name == two.name
    assert files_of(alone) == files_of(two)


def test_the_first_fault_in_the_order_of_rows_is_told(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second faulty row is in the first chunk that a second worker gets, and is found long before the first."""
    rows = chats(41)
    rows[30] = {"messages": [turn("someone", "x")]}
    rows[40] = {"messages": [turn("nobody", "x")]}
    path = write(tmp_path / "chats.jsonl", rows)
    monkeypatch.setattr(tokenise_pool, "_ROWS", 40)
    for workers in (1, 2):
        with pytest.raises(ConfigError) as caught:
            open_cache(path, tokenizer, cache_dir, workers=workers)
        (fault,) = caught.value.faults
        assert fault.key == "data.name"
        assert fault.message.startswith(f"{path}, line 31: ") and "someone" in fault.message
        assert found(cache_dir) == []
        monkeypatch.setattr(tokenise_pool, "_ALONE_SECONDS", 0.0)


class MemoryPart:
    """Rows of this process; a place where reading fails."""

    name = "memory"

    def __init__(self, rows: Sequence[dict[str, Any]], damaged: int | None = None) -> None:
        self._rows, self._damaged = rows, damaged
        self.num_rows = len(rows)
        self.key = {"rows": json.dumps(rows)}

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        for row in range(start, stop):
            if row == self._damaged:
                raise PlacedError(f"{self.place(row)} is damaged")
            yield self._rows[row]

    def place(self, row: int) -> str:
        return f"memory, line {row + 1}"


@pytest.mark.parametrize(
    ("bad", "damaged", "message"),
    [
        ({1: chat("a", "\ud83d"), 2: {"messages": "x"}}, None, "memory, line 2: holds half of a character"),
        ({1: chat("a", "\ud83d")}, 2, "memory, line 2: holds half of a character"),
        ({2: chat("a", "\ud83d")}, 1, "memory, line 2 is damaged"),
    ],
)
def test_the_first_row_comes_first_whichever_step_it_fails_in(
    bad: dict[int, Any], damaged: int | None, message: str, tokenizer: Any
) -> None:
    rows = [bad.get(row, chat("a", "b")) for row in range(4)]
    rules = LossRules.of(SFTDataConfig(name="x"))
    part: Any = MemoryPart(rows, damaged)
    tokeniser = Tokeniser(Work(part=part, tokenizer=tokenizer, renderer=RendererConfig(), rules=rules, key="val.data"))
    with pytest.raises(ConfigError) as caught:
        tokeniser.tokenise(0, 4)
    (fault,) = caught.value.faults
    assert fault.key == "val.data.name"
    assert fault.message.startswith(message)


class Deadly:
    """Kills the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


def test_a_killed_worker_is_told(tokenizer: Any) -> None:
    rules = LossRules.of(SFTDataConfig(name="x"))
    part: Any = Deadly()
    work = Work(part=part, tokenizer=tokenizer, renderer=RendererConfig(), rules=rules, key="data")
    with pytest.raises(RunError, match=r"a process that tokenises was killed \(SIGKILL\), for want of memory perhaps"):
        list(tokenise_pool._tokenise_in_workers(work, [(0, 4), (4, 8)], 1))


@pytest.mark.parametrize("told", ["nothing", "half", "all"])
def test_a_worker_that_is_left_alone_ends_without_a_word(told: str) -> None:
    """Its parent was killed before, while or after it said what there is to do."""
    ours, theirs = Pipe()
    with theirs:
        command = (*tokenise_pool._COMMAND, str(theirs.fileno()))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(),))
    with process, ours:
        match told:
            case "half":
                os.write(ours.fileno(), b"\0\0\0\x64abc")
            case "all":
                ours.send("x" * 100)
                ours.send((0, 4))
        ours.close()
        assert process.communicate(timeout=_LIMIT) == (None, b"")
        assert process.returncode == 0


def delete_samples(folder: Path) -> None:
    (folder / "samples.arrow").unlink()


def cut_tokens(folder: Path) -> None:
    with (folder / "tokens.arrow").open("rb+") as file:
        file.truncate(100)


def overwrite_tokens(folder: Path) -> None:
    size = (folder / "tokens.arrow").stat().st_size
    (folder / "tokens.arrow").write_bytes(bytes(size))


def cut_record(folder: Path) -> None:
    (folder / "cache.json").write_text('{"name": ')


def delete_record(folder: Path) -> None:
    (folder / "cache.json").unlink()


def take_anothers_record(folder: Path) -> None:
    record = json.loads((folder / "cache.json").read_text())
    (folder / "cache.json").write_text(json.dumps(record | {"name": "another"}))


@pytest.mark.parametrize(
    "damage", [delete_samples, cut_tokens, overwrite_tokens, cut_record, delete_record, take_anothers_record]
)
def test_a_damaged_cache_is_made_anew_and_that_is_said(
    damage: Callable[[Path], None],
    tokenizer: Any,
    cache_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / "chats.jsonl", chats(5))
    before = open_cache(path, tokenizer, cache_dir)
    (folder,) = found(cache_dir)
    files = files_of(folder)
    damage(folder)
    with caplog.at_level(logging.WARNING):
        after = open_cache(path, tokenizer, cache_dir)
    (message,) = [record.message for record in caplog.records]
    assert f"{folder} is damaged and is made anew" in message
    assert after.record.digest == before.record.digest
    assert found(cache_dir) == [folder]
    assert files_of(folder) == files


def test_a_full_disk_is_told_and_leaves_nothing(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    """Files of this process may not grow as large as the tokens are."""
    path = write(tmp_path / "chats.jsonl", [chat("a", "many words to be said " * 200)] * 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(RunError) as caught:
            open_cache(path, tokenizer, cache_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        f"tokenised data cannot be written to {cache_dir}: {os.strerror(errno.EFBIG)}. Make space there, or "
        "give another folder as data.cache_dir"
    )
    assert found(cache_dir) == []
    assert open_cache(path, tokenizer, cache_dir).record.num_samples == 60


def test_a_folder_that_cannot_be_written_is_a_fault_of_the_config(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats(1))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        open_cache(path, tokenizer, tmp_path / "file" / "caches")
    assert [fault.key for fault in caught.value.faults] == ["data.cache_dir"]


def in_threads(count: int, work: Callable[[], SampleCache]) -> list[SampleCache]:
    results: list[SampleCache] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT)
    assert len(results) == count
    return results


def test_without_locks_all_do_the_work_and_one_result_stays(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "chats.jsonl", chats(30))
    monkeypatch.setattr(cache_folder, "try_lock", lambda handle: None)
    together = threading.Barrier(3, timeout=_LIMIT)
    write_whole_folder = cache_module._build

    def build(*args: Any) -> None:
        write_whole_folder(*args)
        together.wait()  # nobody publishes before all have built

    monkeypatch.setattr(cache_module, "_build", build)
    caches = in_threads(3, lambda: open_cache(path, tokenizer, cache_dir))
    assert len({cache.record.digest for cache in caches}) == 1
    assert len(found(cache_dir)) == 1


def test_a_crowd_makes_one_cache(tokenizer: Any, cache_dir: Path, tmp_path: Path) -> None:
    """Locks are those of open files, so threads stand for processes here."""
    path = write(tmp_path / "chats.jsonl", chats(30))
    begun: list[int] = []
    together = threading.Barrier(6, timeout=_LIMIT)

    def work() -> SampleCache:
        together.wait()
        return open_cache(path, tokenizer, cache_dir, track=lambda what, done, total: begun.append(done))

    caches = in_threads(6, work)
    assert begun == [0, 30]
    assert len({cache.record.digest for cache in caches}) == 1
    assert len(found(cache_dir)) == 1


def test_who_comes_while_another_is_at_it_waits(
    tokenizer: Any, cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins when the first is in the middle; the first goes on when the second waits."""
    path = write(tmp_path / "chats.jsonl", chats(5))
    begun, waits = threading.Event(), threading.Event()
    results: list[SampleCache] = []

    def slow(what: str, done: int, total: int) -> None:
        begun.set()
        assert waits.wait(_LIMIT)

    first = threading.Thread(target=lambda: results.append(open_cache(path, tokenizer, cache_dir, track=slow)))
    first.start()
    assert begun.wait(_LIMIT)
    monkeypatch.setattr(cache_folder.log, "warning", lambda *said: waits.set())  # shown without a log too
    second = open_cache(path, tokenizer, cache_dir, track=never)
    first.join(_LIMIT)
    assert second.record.digest == results[0].record.digest
    assert len(found(cache_dir)) == 1


def test_only_leftovers_are_removed(cache_dir: Path) -> None:
    """Of this cache and machine all that are there when the lock is had; of others those that nobody writes to."""
    folder = CacheFolder(cache_dir, "chats-1", key="data.cache_dir")
    folder.path.mkdir(parents=True)
    end = "0123456789abcdef" * 2
    own, other = f".chats-1.{folder._host}.{end}", f".chats-2.{folder._host}.{end}"
    away, away_long, other_long = f".chats-1.away.{end}", f".chats-1.away.{end[::-1]}", f".chats-2.away.{end}"
    for name in (own, other, away, away_long, other_long, ".config.of.others", "chats-2"):
        (cache_dir / name).mkdir()
        (cache_dir / name / "tokens.arrow").touch()
        if name not in (own, other, away):
            for path in (cache_dir / name / "tokens.arrow", cache_dir / name):
                os.utime(path, (0, time.time() - 25 * 3600))
    with folder.lock(is_made=lambda: False, on_wait=lambda: None):
        pass
    left = {"chats-1", other, away, ".config.of.others", "chats-2"}
    assert {path.name for path in cache_dir.iterdir()} == left


BUILDER = """
import os, signal, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from configs.data import SFTDataConfig
from configs.renderer import RendererConfig
from trainer.data.chat.cache import pool as tokenise_pool
from trainer.data.chat.cache.cache import open_or_build
from trainer.data.chat.cache.tokenise import Work
from trainer.data.chat.read.conversation import LossRules
from trainer.data.chat.read.parts import open_parts

chats, tokenizer, cache_dir, number = sys.argv[1:]
tokenise_pool._ROWS, tokenise_pool._ALONE_SECONDS = 4, 0.0
config = SFTDataConfig(name=chats)
(part,) = open_parts(config)
tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)


def track(what, done, total):
    if done:
        print(*Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(), flush=True)
        os.kill(os.getpid(), int(number))


work = Work(part=part, tokenizer=tokenizer, renderer=RendererConfig(), rules=LossRules.of(config), key="data")
open_or_build(work, cache_dir=Path(cache_dir), workers=2, track=track)
"""


def is_gone(pid: str) -> bool:
    """The process ended; one that waits for its parent to take note has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_who_is_ended_leaves_no_half_cache_and_no_process(
    number: signal.Signals, tokenizer: Any, cache_dir: Path, tmp_path: Path
) -> None:
    """Killed, it leaves its hidden folder to the next one; interrupted by Ctrl-C, nothing."""
    path = write(tmp_path / "chats.jsonl", chats(60))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-c", BUILDER, path, tmp_path / "tokenizer", cache_dir, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    assert ended.returncode == -number or (number == signal.SIGINT and "KeyboardInterrupt" in ended.stderr), ended
    children = ended.stdout.split()
    assert len(children) == 2
    end = time.monotonic() + _LIMIT
    while not all(map(is_gone, children)):
        assert time.monotonic() < end
        threading.Event().wait(0.02)
    hidden = [entry.name for entry in cache_dir.iterdir() if entry.is_dir()]
    assert len(hidden) == (1 if number == signal.SIGKILL else 0)
    assert all(name.startswith(".") for name in hidden)
    assert open_cache(path, tokenizer, cache_dir).record.num_samples == 60
    assert len(found(cache_dir)) == 1
