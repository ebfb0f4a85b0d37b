from pathlib import Path

import pytest

from configs.cli import render_error, resolve
from configs.errors import ConfigError, Fault

BASE = 'max_steps = 9\n[model.arch]\nmodel_type = "llama"\n[model.init]\n[data]\ntype = "fake"\n'


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE, encoding="utf-8")


def file_faults(text: str | bytes, name: str = "b.toml") -> list[str]:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return fault_lines("@", name)


def fault_lines(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(["@", "base.toml", *argv])
    return render_error(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[optim]\nlearning_rat = 1", "optim.learning_rat (b.toml): unknown key; did you mean optim.lr?"),
        ("[optim]\nweight_deca = 1", "optim.weight_deca (b.toml): unknown key; did you mean optim.weight_decay?"),
        ("lr = 1", "lr (b.toml): unknown key; did you mean optim.lr?"),
        ("[model]\nseq_len = 1", "model.seq_len (b.toml): unknown key; did you mean data.seq_len or val.data.seq_len?"),
        ("max-steps = 1", "max-steps (b.toml): unknown key; did you mean max_steps?"),
        (
            "[data]\nmicro-batch-size = 1",
            "data.micro-batch-size (b.toml): unknown key; did you mean data.micro_batch_size?",
        ),
        ("[optimizer]\nlr = 1", "optimizer (b.toml): unknown key; did you mean optim?"),
        ("[model.ac]\nfrequ = 1", "model.ac.frequ (b.toml): unknown key; did you mean model.ac.freq?"),
        ("[data]\nSeq_Len = 1", "data.Seq_Len (b.toml): unknown key; did you mean data.seq_len?"),
        ("zzzzzz = 1", "zzzzzz (b.toml): unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(text: str, line: str):
    """Field case R111: a misspelled key, a key in the wrong section, a hyphen: never ignored."""
    assert file_faults(text) == [line]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--optim.learning-rat=1",
            "optim.learning_rat (flag --optim.learning-rat): unknown flag; did you mean --optim.lr?",
        ),
        ("--lr=1", "lr (flag --lr): unknown flag; did you mean --optim.lr?"),
        ("--optimizer.lr=1", "optimizer.lr (flag --optimizer.lr): unknown flag; did you mean --optim.lr?"),
        ("--max-step=1", "max_step (flag --max-step): unknown flag; did you mean --max-steps?"),
        ("--data.a.b=1", "data.a.b (flag --data.a.b): unknown flag"),
        ("--clean.x=1", "clean.x (flag --clean.x): unknown flag"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_name(flag: str, line: str):
    """Field case R111, on the command line."""
    assert fault_lines(flag) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('max_steps = "9"', 'max_steps (b.toml): expected a whole number or "None", got "9"'),
        ("max_steps = 9.0", 'max_steps (b.toml): expected a whole number or "None", got 9.0'),
        ("max_steps = 9223372036854775808", "max_steps (b.toml): 9223372036854775808 does not fit in 64 bits"),
        ("max_steps = -1", "max_steps (b.toml): must be at least 0, got -1"),
        ("[optim]\nlr = nan", "optim.lr (b.toml): must be a finite number, got NaN"),
        ("[optim]\nlr = inf", "optim.lr (b.toml): must be a finite number, got Infinity"),
        ("[optim]\nbetas = [0.9]", "optim.betas (b.toml): expected a list of 2, each a number, got [0.9]"),
        ("[optim]\nbetas = [0.9, 1.0]", "optim.betas.1 (b.toml): must be below 1, got 1.0"),
        ('[log]\nlevel = "warn"', None),
        ("model = 5", "model (b.toml): expected a table, got 5"),
        ("model = []", "model (b.toml): expected a table, got []"),
        (
            "ckpt = true",
            'ckpt (b.toml): expected a table or "None", got true '
            '(a table, even an empty one, turns it on, "None" turns it off)',
        ),
        ('optim = "None"', "optim (b.toml): expected a table, got None"),
        ("data = 3", "data (b.toml): expected a table, got 3"),
        ('output_dir = ""', 'output_dir (b.toml): expected a path, got ""'),
        ("[data]\ntype = 3", 'data.type (b.toml): expected "sft", "tokens", "fake" or "none", got 3'),
        ("[data]\ntype = []", 'data.type (b.toml): expected "sft", "tokens", "fake" or "none", got []'),
        (
            "[model.arch]\nday = 1979-05-27",
            'model.arch.day (b.toml): expected any value, got "1979-05-27"; put a date or time in quotes if it is text',
        ),
        (
            '[run]\nname = "a/b"',
            'run.name (b.toml): "a/b" may only have letters, digits and "_", after the first one also "." and "-"',
        ),
        (
            '[run]\nname = ".."',
            'run.name (b.toml): ".." may only have letters, digits and "_", after the first one also "." and "-"',
        ),
        ("[monitors.wandb]\ntags = [1]", "monitors.wandb.tags (b.toml): expected a list, each text, got [1]"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(text: str, line: str | None):
    (got,) = file_faults(text)
    expected = 'log.level (b.toml): expected "debug", "info", "warning" or "error", got "warn"; did you mean "warning"?'
    assert got == (line or expected)


def test_entries_of_a_list_of_tables():
    text = '[val]\nsets = [{name = "a", path = ".", x = 1}, {name = "b"}, {name = "c/d", path = "."}]\n'
    assert file_faults(text) == [
        "val.sets.0.x (b.toml): unknown key",
        "val.sets.1.path (b.toml): is missing: a path",
        'val.sets.2.name (b.toml): "c/d" may only have letters, digits and "_", after the first one also "." and "-"',
    ]


def test_every_fault_is_reported_at_once_with_its_own_file_or_flag():
    Path("b.toml").write_text('max_stepz = 1\n[log]\nlevel = "loud"\n', encoding="utf-8")
    lines = fault_lines("@", "b.toml", "--optim.lr", "-1", "stray", "--data.seq-len=x")
    assert lines == [
        "stray argument 'stray': values follow a flag, files an @",
        'data.seq_len (flag --data.seq-len): expected a whole number, got "x"',
        "max_stepz (b.toml): unknown key; did you mean max_steps?",
        'log.level (b.toml): expected "debug", "info", "warning" or "error", got "loud"',
        "optim.lr (flag --optim.lr): must be at least 0, got -1.0",
    ]


def test_a_fault_between_keys_is_not_guessed_from_the_default_of_a_faulty_one():
    assert file_faults('[data]\nbatch_size = "many"\nmicro_batch_size = 3\n') == [
        'data.batch_size (b.toml): expected a whole number, got "many"'
    ]


class TestFiles:
    def test_missing(self):
        assert fault_lines("@", "no.toml") == ["no.toml: no such file"]
        assert fault_lines("--model", "@", "no.toml") == ["model: no.toml: no such file"]

    def test_folder(self):
        Path("folder").mkdir()
        assert fault_lines("@", "folder") == ["folder: is a folder, not a file"]

    def test_toml_syntax_with_line_and_column(self):
        assert file_faults("a = 1\nb == 2\n") == ["b.toml:2:4: not valid TOML: Invalid value"]
        (line,) = file_faults("a = 1\na = 2\n")
        assert line.startswith("b.toml:2:")

    def test_json_syntax_with_line_and_column(self):
        (line,) = file_faults('{"a": 1,\n x}', "b.json")
        assert line.startswith("b.json:2:2: not valid JSON: ")
        assert file_faults("[1]", "b.json") == ["b.json: holds no table at its top"]
        assert file_faults('{"a": 1, "a": 2}', "b.json") == ['b.json: the key "a" is given twice']

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            (b"a = '\xff'", "b.toml: not UTF-8 text (byte 5)"),
            (b"a = 1\x00", "b.toml:1:6: not valid TOML: "),
            (b"a = " + b"[" * 5000, "b.toml: nested too deeply"),
            (b"a = " + b"[" * 40 + b"]" * 40, "b.toml: nested more than 32 deep"),
            (b"a = 1" + b"0" * 5000, "b.toml: not valid TOML: "),
        ],
    )
    def test_odd_bytes(self, content: bytes, line: str):
        (got,) = file_faults(content)
        assert got.startswith(line)

    def test_odd_json(self):
        (line,) = file_faults(b'{"run": {"name": "\\ud800"}}', "b.json")
        assert line == "b.json: holds a lone surrogate, which is no character"
        assert file_faults(b"[" * 5000, "b.json") == ["b.json: nested too deeply"]
        assert fault_lines("--run", "[" * 100_000)[0].startswith("run (flag --run): expected a table, got ")
        assert fault_lines("--run", '{"a":' * 5000) == [
            "run (flag --run): nested too deeply (a table is given as JSON)"
        ]


def test_nothing_a_terminal_obeys_is_printed():
    lines = fault_lines("--\x1b[31m\n", "--run.name=\x1b]0;x\x07")
    assert [line for line in lines if not line.isprintable()] == []
    assert lines[0] == "\\x1b[31m\\n (flag --\\x1b[31m\\n): unknown flag"


def test_render_error_finds_the_origin_of_a_later_fault():
    error = ConfigError(
        [
            Fault(key="data.paths", message="gone"),
            Fault(key="val.sets.0.path", message="gone"),
            Fault(key="max_steps", message="odd", origin="own.toml"),
            Fault(key="", message="whole"),
            Fault(key="run.name", message="in use"),
        ]
    )
    origins = {"data.paths": "a.toml", "val.sets": "flag --val.sets", "max_steps": "b.toml"}
    assert render_error(error, origins).splitlines() == [
        "data.paths (a.toml): gone",
        "val.sets.0.path (flag --val.sets): gone",
        "max_steps (own.toml): odd",
        "whole",
        "run.name: in use",
    ]
    assert render_error(error).splitlines()[0] == "data.paths: gone"
