from pathlib import Path
from typing import Any

import pytest

from configs.cli import render_error, resolve
from configs.errors import ConfigError
from configs.sft import SFTConfig

RUN = ["--data.type=fake", "--model.arch.model_type=llama", "--model.init", "--max-steps=10"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def value(config: SFTConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def check(argv: list[str], key: str, expected: Any) -> None:
    got = value(resolve([*RUN, *argv]).config, key)
    assert got == expected
    assert type(got) is type(expected)


def fault_lines(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve([*RUN, *argv])
    return render_error(caught.value).splitlines()


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        (["--data.seq-len", "64"], "data.seq_len", 64),
        (["--data.seq_len=64"], "data.seq_len", 64),
        (["--data.seq-len", "1_024"], "data.seq_len", 1024),
        (["--optim.lr", "1e-3"], "optim.lr", 0.001),
        (["--optim.lr", "1"], "optim.lr", 1.0),
        (["--scheduler.type=linear", "--scheduler.warmup-steps", "3"], "scheduler.warmup_steps", 3),
        (["--scheduler.type=linear", "--scheduler.warmup-steps", "0.5"], "scheduler.warmup_steps", 0.5),
        (["--optim.max-norm", "None"], "optim.max_norm", None),
        (["--no-optim.max-norm"], "optim.max_norm", None),
        (["--run.name", "a-b_c.1"], "run.name", "a-b_c.1"),
        (["--run.name=7"], "run.name", "7"),
        (["--output-dir", "out-"], "output_dir", Path("out-")),
        (["--output-dir=-out"], "output_dir", Path("-out")),
        (["--log.level", "debug"], "log.level", "debug"),
        (["--optim.betas", "0.5", "0.6"], "optim.betas", (0.5, 0.6)),
        (["--optim.betas=[0.5, 0.6]"], "optim.betas", (0.5, 0.6)),
        (["--optim", '{"lr": 0.5}'], "optim.lr", 0.5),
    ],
)
def test_values_take_the_type_of_their_field(argv: list[str], key: str, expected: Any):
    check(argv, key, expected)


@pytest.mark.parametrize("text", ["-1e-3", "-5", "-.5", "-inf"])
def test_negative_numbers_are_values_not_flags(text: str):
    (line,) = fault_lines("--optim.lr", text)
    assert line.startswith("optim.lr (flag --optim.lr): must be ")


class TestBooleans:
    """Field case R112: a value that a file sets to true can be set to false, in every spelling."""

    @pytest.fixture(autouse=True)
    def _file(self) -> None:
        Path("on.toml").write_text("clean = true\n[data]\nshuffle = true\n", encoding="utf-8")

    @pytest.mark.parametrize(
        "argv",
        [["--no-clean"], ["--clean", "false"], ["--clean=false"], ["--clean=False"], ["@", "off.toml"]],
    )
    def test_off(self, argv: list[str]):
        Path("off.toml").write_text("clean = false\n", encoding="utf-8")
        check(["@", "on.toml", *argv], "clean", False)

    @pytest.mark.parametrize("argv", [["--clean"], ["--clean", "true"], ["--clean=true"]])
    def test_on(self, argv: list[str]):
        check(argv, "clean", True)

    @pytest.mark.parametrize("argv", [["--no-data.shuffle"], ["--data.shuffle", "false"]])
    def test_nested(self, argv: list[str]):
        check(["@", "on.toml", *argv], "data.shuffle", False)

    def test_a_flag_alone_does_not_swallow_the_next_flag_or_file(self):
        Path("n.toml").write_text("max_steps = 3\n", encoding="utf-8")
        argv = [*RUN[:-1], "--clean", "@", "n.toml", "--dry-run", "--data.seed", "3"]
        config = resolve(argv).config
        assert (config.clean, config.dry_run, config.max_steps, config.data.seed) == (True, True, 3, 3)

    @pytest.mark.parametrize("text", ["yes", "0", "1", "None", "[]", ""])
    def test_anything_else_is_a_fault(self, text: str):
        (line,) = fault_lines(f"--clean={text}")
        assert line.startswith("clean (flag --clean): ")

    def test_no_takes_no_value(self):
        assert fault_lines("--no-clean=false") == ["clean (flag --no-clean): --no-clean takes no value"]

    def test_numbers_in_a_file_are_no_booleans_and_booleans_no_numbers(self):
        Path("bad.toml").write_text("clean = 1\nmax_steps = true\n[optim]\nlr = true\n", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            resolve(["@", "bad.toml", *RUN[:-1]])
        assert render_error(caught.value).splitlines() == [
            "clean (bad.toml): expected true or false, got 1",
            'max_steps (bad.toml): expected a whole number or "None", got true',
            "optim.lr (bad.toml): expected a number, got true",
        ]


class TestLists:
    """Field case R112, lists: also in optional blocks and in the variants of a union."""

    def test_in_a_union(self):
        argv = ["--data.type=tokens", *RUN[1:]]
        for form in (["--data.paths", ".", ".."], ['--data.paths=[".", ".."]'], ["--data.paths", '[".", ".."]']):
            data = resolve([*argv, *form]).config.data
            assert value(resolve([*argv, *form]).config, "data.paths") == [Path(), Path("..")], data

    def test_in_an_optional_block(self):
        for form in (["--val.seq-lens", "64", "128"], ["--val.seq-lens=[64,128]"]):
            check(["--val.interval", "5", "--val.sets", SET, *form], "val.seq_lens", [64, 128])

    def test_of_tables_and_names(self):
        Path("b").mkdir()
        resolved = resolve([*RUN, "--val.data-dir=.", "--val.eval-on-end", "--val.sets", "b", SET])
        assert resolved.config.val is not None
        assert [getattr(entry, "name", entry) for entry in resolved.config.val.sets] == ["b", "a"]

    def test_one_value_is_a_list_of_one(self):
        check(["--monitors.wandb.tags", "x"], "monitors.wandb.tags", ["x"])
        check(["--monitors.wandb.tags=x"], "monitors.wandb.tags", ["x"])
        check(["--monitors.wandb.tags=[]"], "monitors.wandb.tags", [])

    def test_a_flag_replaces_the_list_of_a_file(self):
        Path("t.toml").write_text('[monitors.wandb]\ntags = ["a", "b"]\n', encoding="utf-8")
        check(["@", "t.toml", "--monitors.wandb.tags", "c"], "monitors.wandb.tags", ["c"])


SET = '{"name": "a", "path": "."}'


class TestDicts:
    def test_json(self):
        check(
            ["--model.arch", '{"n": 1, "x": [1.5, null]}'],
            "model.arch",
            {"n": 1, "x": [1.5, None], "model_type": "llama"},
        )

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("64", 64),
            ("1e-3", 0.001),
            ("true", True),
            ("None", None),
            ("silu", "silu"),
            ('"64"', "64"),
            ("[1, 2]", [1, 2]),
            ('{"rope_type": "yarn"}', {"rope_type": "yarn"}),
            ("1979-05-27", "1979-05-27"),
            ("08", "08"),
            ("1\nother = 2", "1\nother = 2"),
        ],
    )
    def test_dotted_values_are_read_like_toml(self, text: str, expected: Any):
        check(["--model.arch.value", text], "model.arch.value", expected)

    def test_dotted_kebab_deep_and_many(self):
        check(["--model.arch.rope-scaling.factor", "2"], "model.arch.rope_scaling", {"factor": 2})
        check(["--model.arch.sizes", "1", "2"], "model.arch.sizes", [1, 2])

    def test_below_a_table_of_a_file(self):
        Path("m.toml").write_text("[model.arch]\nhidden_size = 8\nhead_dim = 4\n", encoding="utf-8")
        argv = ["@", "m.toml", "--model.arch.head_dim", "2"]
        check(argv, "model.arch", {"hidden_size": 8, "head_dim": 2, "model_type": "llama"})


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--clean", "--clean"], "clean (flag --clean): --clean is given twice: which value holds is unclear"),
        (["--clean", "--no-clean"], "clean (flag --no-clean): --clean gives it too: which value holds is unclear"),
        (
            ["--data.seed", "1", "--data.seed=2"],
            "data.seed (flag --data.seed): --data.seed is given twice: which value holds is unclear",
        ),
        (
            ["--optim.lr", "1", "--optim", '{"lr": 2}'],
            "optim.lr (flag --optim): --optim.lr gives it too: which value holds is unclear",
        ),
        (
            ["--ckpt.interval=3", "--no-ckpt"],
            "ckpt (flag --no-ckpt): --ckpt.interval gives it too: which value holds is unclear",
        ),
        (
            ["--no-ckpt", "--ckpt.interval=3"],
            "ckpt (flag --ckpt.interval): --no-ckpt gives it too: which value holds is unclear",
        ),
        (
            ["--monitors.wandb.tags", "a", "--monitors.wandb.tags", "b"],
            "monitors.wandb.tags (flag --monitors.wandb.tags): --monitors.wandb.tags is given twice: "
            "which value holds is unclear; write all entries after one flag",
        ),
    ],
)
def test_contradicting_flags_are_refused(argv: list[str], expected: str):
    assert fault_lines(*argv) == [expected]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--optim.lr"], "optim.lr (flag --optim.lr): needs a value"),
        (["--optim.lr", "--clean"], "optim.lr (flag --optim.lr): needs a value"),
        (["--optim.lr="], "optim.lr (flag --optim.lr): needs a value"),
        (["--optim"], "optim (flag --optim): needs a value: a JSON table, or @ and a file"),
        (["foo"], "stray argument 'foo': values follow a flag, files an @"),
        (["a.toml"], "stray argument 'a.toml': values follow a flag, files an @; for a file write @ a.toml"),
        (["--data.seed", "1", "2"], "stray argument '2': values follow a flag, files an @"),
        (["-x"], "unknown option '-x': flags start with -- and a name"),
        (["--"], "unknown option '--': flags start with -- and a name"),
        (["@"], "@ needs the name of a file after it"),
        (["@", "--clean"], "@ needs the name of a file after it"),
        (
            ["--no-optim"],
            "optim (flag --no-optim): cannot be switched off: it is neither true or false nor an optional block",
        ),
        (["--no-such"], "no_such (flag --no-such): unknown flag"),
        (
            ["--data.no-shuffle"],
            "data.no_shuffle (flag --data.no-shuffle): unknown flag; did you mean --no-data.shuffle?",
        ),
        (["--run.name", "\udcff"], "argument '\\udcff' is not UTF-8 text"),
        (["--optim={"], None),
        (["--optim.betas=[1,"], None),
    ],
)
def test_a_malformed_command_line(argv: list[str], expected: str | None):
    lines = fault_lines(*argv)
    if expected is None:
        assert len(lines) == 1
        assert "column" in lines[0] and "not valid JSON" in lines[0]
    else:
        assert expected in lines
