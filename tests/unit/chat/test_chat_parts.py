"""Parts of chats: what a name means, random access to rows, exact places in messages, bounded memory."""

import gzip
import json
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.data import SFTDataConfig
from configs.errors import ConfigError
from configs.validation import ValChatConfig
from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.read.parts import Part, open_parts
from trainer.data.errors import PlacedError

RULES = LossRules(roles=frozenset({"assistant"}), last_turn_only=False)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def chats(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(start, start + count)
    ]


def write_lines(name: str, rows: list[dict[str, Any]], between: str = "\n") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + between for row in rows).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def write_parquet(name: str, rows: list[dict[str, Any]], group: int = 100) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def save_table(name: str, rows: list[dict[str, Any]], **splits: list[dict[str, Any]]) -> Path:
    from datasets import Dataset, DatasetDict

    tables = {split: Dataset.from_list(more) for split, more in splits.items()}
    (DatasetDict(tables) if splits else Dataset.from_list(rows)).save_to_disk(name)
    return Path(name)


def open_one(name: str, **options: Any) -> Part:
    (part,) = open_parts(SFTDataConfig.model_validate({"name": name, **options}))
    return part


def fault(name: str | list[str], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_parts(SFTDataConfig.model_validate({"name": name, **options}))
    assert {fault.key for fault in caught.value.faults} == {"data.name"}
    return "\n".join(fault.message for fault in caught.value.faults)


def read_fault(part: Part) -> str:
    with pytest.raises(PlacedError) as caught:
        list(part.rows(0, part.num_rows))
    return str(caught.value)


def questions(part: Part, start: int = 0, stop: int | None = None) -> list[str]:
    rows = part.rows(start, part.num_rows if stop is None else stop)
    return [read_conversation(row, RULES).messages[0]["content"] for row in rows]


FORMS: dict[str, Callable[[list[dict[str, Any]]], Path]] = {
    "lines": lambda rows: write_lines("chats.jsonl", rows),
    "blank lines": lambda rows: write_lines("chats.json", rows, between="\r\n \t\n\n"),
    "packed": lambda rows: write_lines("chats.jsonl.gz", rows),
    "parquet": lambda rows: write_parquet("chats.parquet", rows, group=90),
    "saved": lambda rows: save_table("saved", rows),
    "files": lambda rows: [
        write_lines("many/b/2.jsonl", rows[130:]),
        write_lines("many/a.jsonl", rows[:130]),
        write_lines("many/b/1.jsonl", []),
    ][0].parents[1],
}


class TestRandomAccess:
    @pytest.mark.parametrize("form", FORMS)
    def test_any_range_in_any_order(self, form: str):
        part = open_one(str(FORMS[form](chats(300))))
        assert part.num_rows == 300
        expected = [f"q{i}" for i in range(300)]
        assert questions(part) == expected
        for start, stop in (
            (0, 1),
            (1, 64),
            (63, 66),
            (128, 128),
            (299, 300),
            (80, 200),
            (200, 210),
            (150, 300),
            (5, 7),
        ):
            assert questions(part, start, stop) == expected[start:stop]
        # A range that is left half read, and one within another.
        left = part.rows(100, 300)
        assert next(left) == chats(1, 100)[0]
        assert questions(part, 90, 95) == expected[90:95]
        assert next(left) == chats(1, 101)[0]

    @pytest.mark.parametrize("form", FORMS)
    def test_it_goes_to_other_processes(self, form: str):
        part = open_one(str(FORMS[form](chats(300))))
        assert part.num_rows == 300
        assert next(part.rows(7, 9)) == chats(1, 7)[0]
        copy: Part = pickle.loads(pickle.dumps(part))
        assert (copy.name, copy.key, copy.num_rows) == (part.name, part.key, 300)
        assert questions(copy, 250, 252) == ["q250", "q251"] and copy.place(250) == part.place(250)
        assert json.loads(json.dumps(part.key)) == part.key

    def test_places_count_from_one(self):
        assert open_one(str(FORMS["lines"](chats(300)))).place(299) == "chats.jsonl, line 300"
        assert open_one(str(FORMS["blank lines"](chats(300)))).place(299) == "chats.json, line 898"
        assert open_one(str(FORMS["packed"](chats(300)))).place(64) == "chats.jsonl.gz, line 65"
        assert open_one(str(FORMS["parquet"](chats(300)))).place(299) == "chats.parquet, row 300"
        assert open_one(str(FORMS["saved"](chats(300)))).place(0) == "saved, row 1"
        files = open_one(str(FORMS["files"](chats(300))))
        assert [files.place(row) for row in (129, 130)] == ["many/a.jsonl, line 130", "many/b/2.jsonl, line 1"]

    @pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
    def test_a_packed_file_is_read_once_by_ascending_ranges(self, suffix: str, monkeypatch: pytest.MonkeyPatch):
        part = open_one(str(write_lines(f"chats.{suffix}", chats(300))))
        assert part.num_rows == 300
        opened = []
        real = Path.open
        monkeypatch.setattr(
            Path, "open", lambda path, *args, **kwargs: opened.append(path) or real(path, *args, **kwargs)
        )
        for start in range(0, 300, 30):
            assert questions(part, start, start + 20)[0] == f"q{start}"
        assert len(opened) == (1 if suffix == "jsonl.gz" else 10)

    def test_mark_of_byte_order(self):
        Path("chats.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(chats(1)[0]).encode() + b"\n")
        assert questions(open_one("chats.jsonl")) == ["q0"]


class TestColumnar:
    ROWS = (
        [{"name": "f", "arguments": {"b": 1, "a": "x"}}],
        [{"name": "g", "arguments": {"c": None, "d": [None, 1]}}],
        None,
    )

    def rows(self, **columns: Any) -> list[dict[str, Any]]:
        asks = {"role": "user", "content": "q"}
        return [
            {"messages": [asks, {"role": "assistant", "content": "a", "tool_calls": calls}], **columns}
            for calls in self.ROWS
        ]

    def calls(self, part: Part) -> list[Any]:
        conversations = [read_conversation(row, RULES) for row in part.rows(0, part.num_rows)]
        assert [conversation.messages[0] for conversation in conversations] == [{"role": "user", "content": "q"}] * 3
        calls = [conversation.messages[1].get("tool_calls") for conversation in conversations]
        return [call and call[0]["function"]["arguments"] for call in calls]

    def test_padding_is_left_out_of_columns_and_nulls_stay_in_text(self):
        """Arguments of a tool are what was written: Arrow gives every call the keys of all others, as null."""
        write_lines("chats.jsonl", self.rows())
        assert self.calls(open_one("chats.jsonl")) == [{"b": 1, "a": "x"}, {"c": None, "d": [None, 1]}, None]
        write_parquet("chats.parquet", self.rows(extra=[1.5], tools=None))
        save_table("saved", self.rows(extra=[1.5], tools=None))
        for name in ("chats.parquet", "saved"):
            part = open_one(name)
            assert self.calls(part) == [{"b": 1, "a": "x"}, {"d": [None, 1]}, None]
            assert list(next(part.rows(0, 1))) == ["messages", "tools"], "other columns are not read"

    @pytest.mark.parametrize("whole", [False, True])
    def test_json_columns_are_decoded_and_keep_their_nulls(self, whole: bool):
        from datasets import Dataset, Features, Json, List, Value

        message = {
            "role": Value("string"),
            "content": Json(),
            "tool_calls": List({"name": Value("string"), "arguments": Json()}),
        }
        features = Features({"messages": List(Json() if whole else message)})
        table = Dataset.from_list(self.rows(), features=features)
        table.save_to_disk("saved")
        assert self.calls(open_one("saved")) == [{"b": 1, "a": "x"}, {"c": None, "d": [None, 1]}, None]
        table.to_parquet("chats.parquet")
        assert self.calls(open_one("chats.parquet")) == [{"b": 1, "a": "x"}, {"c": None, "d": [None, 1]}, None]

    def test_integers_of_any_size_stay(self):
        """Field case R40: as an object and as text, in lines and JSON columns, beyond 64 bits too."""
        numbers = {"n": 2**70, "m": [-(2**63) - 1, 2**64 - 1], "f": 1e30}
        row = {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": numbers}]}]}
        text = {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": json.dumps(numbers)}]}]}
        write_lines("chats.jsonl", [row, text])
        message = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(row["messages"][0])]))
        messages = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), message)
        pq.write_table(pa.table({"messages": messages}), "chats.parquet")
        for name in ("chats.jsonl", "chats.parquet"):
            part = open_one(name)
            for found in part.rows(0, part.num_rows):
                (message,) = read_conversation(found, RULES).messages
                assert json.dumps(message["tool_calls"][0]["function"]["arguments"]) == json.dumps(numbers)

    def test_maps_are_objects(self):
        call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
        message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
        messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [("z", None), ("a", "1")]}]}]
        table = pa.table({"messages": pa.array([messages], pa.list_(message))})
        pq.write_table(table, "chats.parquet")
        (row,) = open_one("chats.parquet").rows(0, 1)
        function = read_conversation(row, RULES).messages[0]["tool_calls"][0]["function"]
        assert list(function["arguments"].items()) == [("z", None), ("a", "1")]

    @pytest.mark.parametrize("form", ["parquet", "saved"])
    def test_a_missing_column_names_the_columns_found(self, form: str):
        path = FORMS[form]([{"text": "a", "prompt": "b"}])
        assert fault(str(path)) == (
            f"{path}: there is neither messages nor prompt with completion; the columns are 'text', 'prompt'"
        )


class TestNames:
    def test_splits_of_a_folder(self):
        for name, start in (("train-00000-of-00002", 0), ("train-00001-of-00002", 10), ("test", 20)):
            write_parquet(f"folder/data/{name}.parquet", chats(2, start))
        write_lines("folder/dataset_infos.json", [{}])
        assert questions(open_one("folder")) == ["q0", "q1", "q10", "q11"]
        assert questions(open_one("folder", splits=["test"])) == ["q20", "q21"]
        assert open_one("folder", splits=["test"]).name == "folder (test)"
        assert fault("folder", splits=["dev"]) == (
            "folder holds no file or folder that is named after the split 'dev'; there are train, test"
        )

    def test_folders_named_after_splits_and_subsets(self):
        write_lines("folder/easy/train/b.jsonl", chats(1, 1))
        write_lines("folder/easy/train/a.jsonl", chats(1, 0))
        write_lines("folder/easy/val/a.jsonl", chats(1, 2))
        parts = open_parts(
            SFTDataConfig.model_validate({"name": "folder", "subsets": ["easy"], "splits": ["val", "train"]})
        )
        assert [questions(part) for part in parts] == [["q2"], ["q0", "q1"]]
        assert fault("folder", subsets=["hard"]) == "there is no folder folder/hard for the subset 'hard' of folder"

    def test_one_file_and_its_split(self):
        write_lines("chats.jsonl", chats(1))
        write_lines("test.jsonl", chats(1))
        assert open_one("chats.jsonl", splits=["train"]).name == "chats.jsonl"
        assert open_one("test.jsonl", splits=["test"]).num_rows == 1
        assert fault("chats.jsonl", splits=["test"]) == (
            "chats.jsonl is one file and has no split 'test'; leave the split out"
        )
        assert fault("chats.jsonl", subsets=["easy"]) == "chats.jsonl is a file and has no subset 'easy'"

    def test_saved_datasets(self):
        save_table("saved", chats(2))
        save_table("splits", [], train=chats(2), test=chats(1, 5))
        save_table("tests", [], test=chats(1))
        assert questions(open_one("saved", splits=["train"])) == ["q0", "q1"]
        assert fault("saved", splits=["test"]).startswith(
            "saved has no split 'test': it is one dataset, saved as 'train'"
        )
        assert questions(open_one("splits")) == ["q0", "q1"]
        assert questions(open_one("splits", splits=["test"])) == ["q5"]
        assert open_one("splits").key != open_one("splits", splits=["test"]).key
        assert fault("tests") == "tests has no split 'train'; its splits are 'test': say in splits which to take"
        save_table("none", [])
        assert fault("none") == "none was saved without rows, or a split of it was; leave that out"
        (Path("saved") / "state.json").write_text("{")
        assert fault("saved").startswith("saved cannot be read: ")

    def test_unclear_folders_are_refused(self):
        write_lines("both/a.jsonl", chats(1))
        write_parquet("both/a.parquet", chats(1))
        assert fault("both") == (
            "both holds files of several kinds (a.jsonl, a.parquet), maybe the same rows twice; name the files"
        )
        write_lines("mixed/train.jsonl", chats(1))
        write_lines("mixed/more.jsonl", chats(1))
        assert fault("mixed") == "mixed holds the splits train beside more.jsonl: say in splits which to take"
        write_lines("tests/test.jsonl", chats(1))
        assert fault("tests") == "tests holds the splits test: say in splits which to take"
        Path("other").mkdir()
        assert fault("other") == "the folder other holds no file that ends with .jsonl, .jsonl.gz, .json, .parquet"
        Path("other/a.csv").touch()
        assert fault("other").endswith("; it holds others, a.csv for one")
        assert fault("other/a.csv").startswith("other/a.csv: only files that end with .jsonl,")

    def test_every_part_that_is_at_fault_is_named(self):
        Path("empty.jsonl").touch()
        Path("bad.parquet").write_bytes(b"PAR1 not at all PAR1")
        message = fault(["gone.jsonl", "empty.jsonl", "bad.parquet"])
        assert message.startswith("gone.jsonl does not exist\nempty.jsonl is empty\nbad.parquet cannot be read: ")
        with pytest.raises(ConfigError, match=r"^val\.data\.name: gone\.jsonl does not exist$"):
            open_parts(ValChatConfig(name="gone.jsonl"))

    def test_a_pipe_is_no_file_of_rows(self):
        Path("folder").mkdir()
        os.mkfifo("folder/a.jsonl")
        assert fault("folder") == "folder/a.jsonl is no regular file"

    def test_an_id_that_the_hub_does_not_give(self, monkeypatch: pytest.MonkeyPatch):
        import datasets.config
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        message = fault("some/chats", subsets=["easy"], splits=["test"])
        assert message.startswith(
            "there is no file or folder some/chats here, and the Hugging Face hub does not give the dataset "
            "some/chats (easy, test): Couldn't reach 'some/chats' on the Hub (OfflineModeIsEnabled). Without network, "
        )

    def test_the_cache_gives_what_the_hub_gave(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """As in the workers of a run, which do not ask the hub. Where its choice among the subsets cannot be seen in
        the cache, the launcher says so."""
        import datasets
        import datasets.config
        import huggingface_hub.constants

        class OfTheHub(datasets.GeneratorBasedBuilder):
            def _info(self) -> datasets.DatasetInfo:
                return datasets.DatasetInfo()

            def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
                return [datasets.SplitGenerator(name="train", gen_kwargs={})]

            def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
                yield from enumerate(chats(3))

        def of_the_hub(name: str, subset: str | None, *, split: str) -> Any:
            builder = OfTheHub(repo_id=name, dataset_name="chats", config_name=subset or "all", hash="abc")
            builder.download_and_prepare()
            return builder.as_dataset(split)

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        load_dataset = datasets.load_dataset
        found = []
        for offline in (False, True):
            monkeypatch.setattr(datasets, "load_dataset", load_dataset if offline else of_the_hub)
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
            monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
            found.append(open_one("some/chats"))
        assert found[1].key == found[0].key and found[1].num_rows == 3

        monkeypatch.setattr(datasets, "load_dataset", of_the_hub)
        assert open_one("some/chats", subsets=["easy"]).num_rows == 3
        assert fault("some/chats") == (
            "the cache of datasets holds some/chats with the subsets all, easy: say which to take, that of the hub's "
            'choice is subsets = ["all"]'
        )

    def test_an_id_of_the_hub(self, monkeypatch: pytest.MonkeyPatch):
        import datasets

        asked = []

        def load_dataset(*args: Any, **kwargs: Any) -> datasets.Dataset:
            asked.append((args, kwargs))
            return datasets.Dataset.from_list([{**row, "id": 3} for row in chats(300)])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        part = open_one("some/chats")
        assert asked == [(("some/chats", None), {"split": "train"})], "nothing that lets code of the hub run"
        assert part.name == "some/chats (train)" and part.place(9) == "some/chats (train), row 10"
        assert questions(part, 250, 300) == [f"q{i}" for i in range(250, 300)]
        assert part.key["rows"] == 300 and isinstance(part.key["fingerprint"], str)


class TestBadRows:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"hello", "is not JSON: unexpected character"),
            (b'{"messages": [}', "is not JSON: unexpected character"),
            (b'{"messages": NaN}', "is not JSON: unexpected character"),
            (b"[", "is not JSON: "),
            (b'{"messages": "\xff"}', "is not UTF-8: byte 0xff at byte 15 of the line"),
            (b"[1, 2]", "is a list; every line must be one object"),
            (b"null", "is null; every line must be one object"),
        ],
    )
    @pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
    def test_the_line_is_named(self, line: bytes, message: str, suffix: str):
        good = [json.dumps(row).encode() for row in chats(80)]
        text = b"\n".join([*good[:70], b"", line, *good[70:]])
        Path(f"bad.{suffix}").write_bytes(gzip.compress(text) if suffix == "jsonl.gz" else text)
        part = open_one(f"bad.{suffix}")
        assert part.num_rows == 81 and part.place(70) == f"bad.{suffix}, line 72"
        assert read_fault(part).startswith(f"bad.{suffix}, line 72 {message}")

    def test_a_list_over_several_lines_says_what_to_do(self):
        Path("list.json").write_text(json.dumps(chats(2), indent=1))
        assert read_fault(open_one("list.json")).endswith("; write every row as one object on one line")

    def test_a_damaged_archive(self):
        path = write_lines("chats.jsonl.gz", chats(1000))
        path.write_bytes(path.read_bytes()[:-500])
        part = open_one("chats.jsonl.gz")
        with pytest.raises(PlacedError, match=r"^chats\.jsonl\.gz cannot be read: Compressed file ended before"):
            assert part.num_rows
        path.write_bytes(b"no archive")
        with pytest.raises(PlacedError, match=r"^chats\.jsonl\.gz cannot be read: Not a gzipped file"):
            assert open_one("chats.jsonl.gz").num_rows

    def test_a_damaged_parquet_file(self):
        path = write_parquet("chats.parquet", chats(2000))
        content = bytearray(path.read_bytes())
        content[4:2000] = bytes(1996)
        path.write_bytes(content)
        assert read_fault(open_one("chats.parquet")).startswith("chats.parquet cannot be read: ")

    @pytest.mark.parametrize("form", ["lines", "packed", "parquet"])
    def test_a_file_that_changes_meanwhile(self, form: str):
        path = FORMS[form](chats(300))
        part = open_one(str(path))
        assert part.num_rows == 300
        FORMS[form](chats(299))
        assert (
            read_fault(part)
            == f"{path} cannot be read: it changed since it was opened; start again when nobody writes it"
        )
        path.unlink()
        assert read_fault(part) == f"{path} cannot be read: No such file or directory"


class TestKey:
    def test_it_follows_the_contents(self):
        path = write_lines("chats.jsonl", chats(300))
        key = open_one("chats.jsonl").key
        assert open_one("chats.jsonl").key == key == open_one(str(path.absolute())).key
        status = path.stat()
        keys = [key]
        content = path.read_bytes()
        path.write_bytes(content[:-9] + b"9" + content[-8:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        keys.append(open_one("chats.jsonl").key)
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert open_one("chats.jsonl").key == key
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        keys.append(open_one("chats.jsonl").key)
        path.rename("other.jsonl")
        os.utime("other.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
        keys.append(open_one("other.jsonl").key)
        assert len({json.dumps(key) for key in keys}) == 4

    def test_a_large_file_is_sampled_only(self):
        """A sparse file of a terabyte: read whole it would take hours."""
        with Path("huge.jsonl").open("wb") as file:
            file.write(b"{}\n")
            file.truncate(1 << 40)
        assert open_one("huge.jsonl").key["bytes"] == 1 << 40


@pytest.mark.parametrize(("form", "rows"), [("jsonl", 1000), ("jsonl.gz", 1000), ("parquet", 4000)])
def test_memory_does_not_grow_with_the_file(form: str, rows: int):
    """What Python and Arrow hold while a file is read through, against one with a third of its rows."""

    def peak(count: int) -> int:
        rows = [{"prompt": f"{i}" + random.Random(i).randbytes(250).hex(), "completion": "y"} for i in range(count)]
        name = f"{count}.{form}"
        part = open_one(str(write_parquet(name, rows, group=count) if form == "parquet" else write_lines(name, rows)))
        del rows
        before, arrow = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        try:
            for start in range(0, part.num_rows, 100):
                for _ in part.rows(start, start + 100):
                    arrow = max(arrow, pa.total_allocated_bytes() - before)
            return tracemalloc.get_traced_memory()[1] + arrow
        finally:
            tracemalloc.stop()

    small, large = peak(rows), peak(3 * rows)
    assert large < small + 300 * rows, "the file's 500 bytes per row must not be held"
