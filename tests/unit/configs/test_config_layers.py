import json
from pathlib import Path

import pytest

from configs.cli import Resolved, render_error, resolve
from configs.errors import ConfigError
from configs.sft import SFTConfig

BASE = """
max_steps = 100
[model.arch]
model_type = "llama"
hidden_size = 32
[model.init]
[data]
type = "fake"
batch_size = 8
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("base.toml", BASE)


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def sft(*argv: str) -> Resolved[SFTConfig]:
    return resolve(["@", "base.toml", *argv])


def fault_lines(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sft(*argv)
    return render_error(caught.value).splitlines()


def test_flags_beat_later_files_beat_earlier_files_beat_defaults():
    write("b.toml", "max_steps = 200\n[data]\nseq_len = 64\nbatch_size = 16\n")
    write("c.toml", "[data]\nbatch_size = 32\n")
    resolved = resolve(["--data.seq-len", "128", "@", "base.toml", "@b.toml", "@", "c.toml"])
    assert resolved.config.max_steps == 200
    assert resolved.config.data.batch_size == 32
    assert resolved.config.data.seq_len == 128
    assert resolved.config.data.num_workers == 2
    assert resolved.origins == {
        "model.arch.model_type": "base.toml",
        "model.arch.hidden_size": "base.toml",
        "model.init": "base.toml",
        "data.type": "base.toml",
        "max_steps": "b.toml",
        "data.batch_size": "c.toml",
        "data.seq_len": "flag --data.seq-len",
    }


def test_lists_replace_and_tables_merge():
    write("b.toml", '[model.arch]\nhidden_size = 64\nlayers = [1, 2, 3]\n[monitors.wandb]\ntags = ["a", "b"]\n')
    write("c.toml", '[model.arch]\nlayers = [4]\n[monitors.wandb]\ntags = ["c"]\n')
    config = sft("@", "b.toml", "@", "c.toml").config
    assert config.model.arch == {"model_type": "llama", "hidden_size": 64, "layers": [4]}
    assert config.monitors.wandb is not None
    assert config.monitors.wandb.tags == ["c"]


def test_file_below_a_table():
    write("model.toml", 'attn = "sdpa"\n[arch]\nhidden_size = 48\n')
    write("arch.json", '{"head_dim": 8}')
    resolved = sft("--model", "@", "model.toml", "--model.arch", "@arch.json")
    assert resolved.config.model.attn == "sdpa"
    assert resolved.config.model.arch == {"model_type": "llama", "hidden_size": 48, "head_dim": 8}
    assert resolved.origins["model.arch.head_dim"] == "arch.json"


def test_a_byte_order_mark_and_windows_line_ends_are_read():
    Path("b.toml").write_bytes(b"\xef\xbb\xbfmax_steps = 7\r\nclean = true\r\n")
    config = sft("@", "b.toml").config
    assert (config.max_steps, config.clean) == (7, True)


class TestOptionalBlocks:
    def test_flag_turns_a_block_on_with_its_defaults(self):
        config = sft("--ckpt").config
        assert config.ckpt is not None
        assert config.ckpt.keep_last is None
        assert sft().config.ckpt is None

    @pytest.mark.parametrize("flag", [["--ckpt"], ["--ckpt", "true"], ["--ckpt=true"], ["--ckpt", "{}"]])
    def test_flag_keeps_what_files_gave(self, flag: list[str]):
        write("b.toml", "[ckpt]\ninterval = 5\n")
        config = sft("@", "b.toml", *flag).config
        assert config.ckpt is not None
        assert config.ckpt.interval == 5

    @pytest.mark.parametrize(
        "flag", [["--no-ckpt"], ["--ckpt", "false"], ["--ckpt=false"], ["--ckpt", "None"], ["--ckpt=None"]]
    )
    def test_flag_turns_a_block_off(self, flag: list[str]):
        write("b.toml", "[ckpt]\ninterval = 5\n")
        assert sft("@", "b.toml", *flag).config.ckpt is None

    def test_none_text_turns_a_block_off_and_a_later_table_turns_it_on_anew(self):
        write("b.toml", "[ckpt]\ninterval = 5\nkeep_last = 1\n")
        write("off.toml", 'ckpt = "None"\n')
        write("on.toml", "[ckpt]\ninterval = 7\n")
        off = sft("@", "b.toml", "@", "off.toml")
        assert off.config.ckpt is None
        assert off.origins["ckpt"] == "off.toml"
        on = sft("@", "b.toml", "@", "off.toml", "@", "on.toml")
        assert on.config.ckpt is not None
        assert (on.config.ckpt.interval, on.config.ckpt.keep_last) == (7, None)
        assert "ckpt" not in on.origins

    def test_a_key_below_turns_a_block_on(self):
        config = sft("--ckpt.interval", "9", "--ckpt").config
        assert config.ckpt is not None
        assert config.ckpt.interval == 9

    def test_nested_block(self):
        assert sft("--monitors.wandb").config.monitors.wandb is not None
        write("b.toml", "[monitors.wandb]\n")
        assert sft("@", "b.toml", "--no-monitors.wandb").config.monitors.wandb is None


class TestUnions:
    def test_switching_the_type_keeps_what_the_new_one_has_and_says_what_it_drops(self):
        write("tokens.toml", '[data]\ntype = "tokens"\npaths = ["."]\ndocument_masking = false\nseq_len = 64\n')
        write("paths.toml", '[data]\npaths = ["gone"]\n')
        resolved = sft("@", "tokens.toml", "@", "paths.toml", "--data.type", "fake")
        assert resolved.config.data.type == "fake"
        assert (resolved.config.data.seq_len, resolved.config.data.batch_size) == (64, 8)
        assert resolved.notes == [
            'data.type = "fake" (flag --data.type) drops what only "tokens" has: '
            "data.paths (paths.toml), data.document_masking (tokens.toml)"
        ]
        assert not [key for key in resolved.origins if key in ("data.paths", "data.document_masking")]

    def test_a_file_switches_the_type_whatever_the_order_of_its_keys(self):
        write("lin.toml", '[scheduler]\ntype = "linear"\ndecay_steps = 5\nwarmup_steps = 3\n')
        write("cos.toml", '[scheduler]\nmin_lr = 1e-5\ntype = "cosine"\n')
        resolved = sft("@", "lin.toml", "@", "cos.toml")
        assert resolved.config.scheduler.model_dump() == {"type": "cosine", "warmup_steps": 3, "min_lr": 1e-5}
        assert resolved.notes == [
            'scheduler.type = "cosine" (cos.toml) drops what only "linear" has: scheduler.decay_steps (lin.toml)'
        ]

    def test_a_key_that_no_variant_has_is_not_dropped_but_refused(self):
        write("tokens.toml", '[data]\ntype = "tokens"\npaths = ["."]\npathz = 1\n')
        assert fault_lines("@", "tokens.toml", "--data.type", "fake") == [
            "data.pathz (tokens.toml): unknown key; did you mean data.paths?"
        ]

    def test_keys_without_a_type_belong_to_the_default_variant(self):
        assert fault_lines("--scheduler.warmup-steps", "3") == [
            "scheduler.warmup_steps (flag --scheduler.warmup-steps): "
            'is not a key of type = "constant"; it belongs to type = "linear" or "cosine"'
        ]
        assert sft("--optim.lr", "1e-3").config.optim.lr == 1e-3

    def test_a_type_given_later_than_its_keys(self):
        write("warm.toml", "[scheduler]\nwarmup_steps = 4\n")
        resolved = sft("@", "warm.toml", "--scheduler.type", "linear")
        assert resolved.config.scheduler.model_dump()["warmup_steps"] == 4
        assert resolved.notes == []

    def test_keys_of_another_variant_beside_the_type_are_refused(self):
        write("b.toml", 'max_steps = 3\n[model.arch]\nmodel_type = "llama"\n[model.init]\n')
        with pytest.raises(ConfigError) as caught:
            resolve(["@", "b.toml", "--data.type", "fake", "--data.paths", "x"])
        assert render_error(caught.value) == (
            'data.paths (flag --data.paths): is not a key of type = "fake"; it belongs to type = "tokens"'
        )

    def test_an_unknown_type_lists_the_variants(self):
        assert fault_lines("--data.type", "fakes") == [
            'data.type (flag --data.type): expected "sft", "tokens", "fake" or "none", got "fakes"; did you mean '
            '"fake"?'
        ]
        write("b.toml", "max_steps = 3\n")
        with pytest.raises(ConfigError) as caught:
            resolve(["@", "b.toml"])
        assert render_error(caught.value) == 'data: is missing: a table with type = "sft", "tokens", "fake" or "none"'


class TestResolvedJson:
    ARGV = (
        "--ckpt.interval",
        "5",
        "--optim.max-norm",
        "None",
        "--scheduler.type",
        "linear",
        "--optim.betas",
        "0.8",
        "0.9",
    )

    def test_reads_back_as_the_same_object(self):
        config = sft(*self.ARGV, "--model.arch.limit", "inf", "--scheduler.warmup-steps", "0.25").config
        text = config.model_dump_json()
        assert SFTConfig.model_validate_json(text) == config
        assert json.loads(text)["optim"]["max_norm"] is None
        assert json.loads(text)["val"] is None

    def test_is_a_layer_too(self):
        config = sft(*self.ARGV).config
        write("sft.json", config.model_dump_json())
        assert resolve(["@", "sft.json"]).config == config
        again = resolve(["@", "sft.json", "--max-steps", "3"])
        assert again.config == config.model_copy(update={"max_steps": 3})
        assert again.origins["optim.max_norm"] == "sft.json"

    def test_null_replaces_a_block_of_an_earlier_layer(self):
        write("sft.json", sft().config.model_dump_json())
        write("b.toml", "[ckpt]\n")
        assert resolve(["@", "b.toml", "@", "sft.json"]).config.ckpt is None
