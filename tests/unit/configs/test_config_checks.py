from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.checks import check_schedule
from configs.cli import render_error, resolve
from configs.data import FakeDataConfig
from configs.errors import ConfigError
from configs.model import ModelConfig
from configs.optim import CosineSchedulerConfig, LinearSchedulerConfig
from configs.sft import SFTConfig

RUN = {"data.type": "fake", "model.arch.model_type": "llama", "model.init": "{}", "max_steps": "100"}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("file").touch()


def sft(**flags: str | None) -> SFTConfig:
    """The config of these flags (`__` is the dot) on top of RUN; None leaves one of RUN out."""
    given = RUN | {key.replace("__", "."): text for key, text in flags.items()}
    return resolve([f"--{key}={text}" for key, text in given.items() if text is not None]).config


def faults(**flags: str | None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        sft(**flags)
    assert len({fault.key for fault in caught.value.faults}) == len(caught.value.faults)
    return {fault.key: fault.message for fault in caught.value.faults}


def test_the_length_of_the_run_is_given():
    assert faults(max_steps=None) == {
        "max_steps": "is missing: a whole number; or give data.max_epochs for as many steps as the data allows"
    }
    assert sft(max_steps=None, data__max_epochs="1").max_steps is None


class TestSchedule:
    @pytest.mark.parametrize(
        ("warmup", "decay", "message"),
        [
            ("60", "41", "warmup_steps + decay_steps = 60 + 41 is longer than the run of 100 steps"),
            ("0.6", "41", "warmup_steps + decay_steps = 0.6 + 41 is longer than the run of 100 steps"),
            ("0.6", "0.5", "warmup_steps + decay_steps = 0.6 + 0.5 is longer than the run of 100 steps"),
            ("0", "101", "warmup_steps + decay_steps = 0 + 101 is longer than the run of 100 steps"),
        ],
    )
    def test_longer_than_the_run(self, warmup: str, decay: str, message: str):
        got = faults(scheduler__type="linear", scheduler__warmup_steps=warmup, scheduler__decay_steps=decay)
        assert got == {"scheduler.decay_steps": message}

    def test_warmup_alone_names_the_warmup(self):
        assert faults(scheduler__type="linear", scheduler__warmup_steps="101") == {
            "scheduler.warmup_steps": "warmup_steps + decay_steps = 101 + 0 is longer than the run of 100 steps"
        }
        assert faults(scheduler__type="cosine", scheduler__warmup_steps="101") == {
            "scheduler.warmup_steps": "warmup_steps = 101 is longer than the run of 100 steps"
        }

    @pytest.mark.parametrize(("warmup", "decay"), [("60", "40"), ("0.5", "0.5"), ("0.001", "0"), ("100", "0")])
    def test_as_long_as_the_run(self, warmup: str, decay: str):
        config = sft(scheduler__type="linear", scheduler__warmup_steps=warmup, scheduler__decay_steps=decay)
        assert isinstance(config.scheduler, LinearSchedulerConfig)

    @pytest.mark.parametrize("text", ["1.0", "2.5"])
    def test_neither_count_nor_fraction(self, text: str):
        assert faults(scheduler__type="cosine", scheduler__warmup_steps=text) == {
            "scheduler.warmup_steps": f"{text} is neither a count (a whole number) nor a fraction of the run "
            "(a number below 1)"
        }

    def test_min_lr_above_the_peak(self):
        assert faults(scheduler__type="cosine", scheduler__min_lr="0.1", optim__lr="0.01") == {
            "scheduler.min_lr": "0.1 is above the peak, optim.lr = 0.01"
        }

    def test_counts_wait_for_the_steps_that_the_data_allows(self):
        scheduler = LinearSchedulerConfig(warmup_steps=5, decay_steps=6)
        assert check_schedule(scheduler, lr=1.0, total_steps=None) == []
        assert [fault.key for fault in check_schedule(scheduler, lr=1.0, total_steps=10)] == ["scheduler.decay_steps"]
        fractions = LinearSchedulerConfig(warmup_steps=0.5, decay_steps=0.6)
        assert [fault.key for fault in check_schedule(fractions, lr=1.0, total_steps=None)] == ["scheduler.decay_steps"]
        assert check_schedule(CosineSchedulerConfig(warmup_steps=0.5), lr=1.0, total_steps=None) == []


class TestWeights:
    def test_name_alone_gives_model_and_weights(self):
        config = sft(model__name="some/model", model__arch__model_type=None, model__init=None)
        assert config.model.takes_weights_of_name and config.tokenizer_name == "some/model"

    def test_name_beside_an_architecture(self):
        got = faults(model__name="some/model")
        assert got["model.name"].startswith('describes two models: "some/model" here and another one in [model.arch]')

    def test_a_name_that_can_only_be_a_folder(self):
        got = faults(model__name="./gone", model__arch__model_type=None)
        assert got == {"model.name": "gone does not exist"}

    def test_nothing_at_all(self):
        assert list(faults(model__arch__model_type=None, model__init=None)) == ["model.arch", "model.init"]

    def test_neither_init_nor_resume(self):
        got = faults(model__init=None)
        assert got["model.init"].startswith("is missing: nothing says where the weights come from")

    def test_resume_decides_with_and_without_init(self):
        assert sft(model__init=None, resume="{}", run__name="a").model.init is None
        assert sft(resume="{}", run__name="a").model.init is not None

    def test_arch_without_a_model_type(self):
        got = faults(model__arch__model_type=None, model__arch__hidden_size="8")
        assert list(got) == ["model.arch.model_type"]

    @pytest.mark.parametrize(
        ("flags", "key"),
        [
            ({"optimization_dtype": "float64", "compute_dtype": "float32"}, "model.compute_dtype"),
            ({"optimization_dtype": "float64", "reduce_dtype": "float32"}, "model.reduce_dtype"),
            ({"compute_dtype": "float64"}, "model.compute_dtype"),
            ({"attn": "varlen", "compute_dtype": "float32"}, "model.attn"),
            ({"attn": "varlen", "optimization_dtype": "float64"}, "model.attn"),
        ],
    )
    def test_dtypes_that_do_not_go_together(self, flags: dict[str, str], key: str):
        assert list(faults(**{f"model__{name}": text for name, text in flags.items()})) == [key]

    def test_resolved_dtypes(self):
        def resolved(**dtypes: str) -> tuple[str, str]:
            config = ModelConfig.model_validate(dtypes)
            return config.resolved_compute_dtype, config.resolved_reduce_dtype

        assert resolved() == ("bfloat16", "float32")
        assert resolved(optimization_dtype="float64") == ("float64", "float64")
        assert resolved(compute_dtype="float32", reduce_dtype="bfloat16") == ("float32", "bfloat16")
        assert resolved(attn="varlen") == ("bfloat16", "float32")


class TestBatch:
    def test_micro_batches_are_whole(self):
        assert faults(data__batch_size="8", data__micro_batch_size="3") == {
            "data.batch_size": "8 is not a multiple of micro_batch_size = 3"
        }
        with pytest.raises(ValidationError, match="batch_size: 8 is not a multiple"):
            FakeDataConfig(type="fake", batch_size=8, micro_batch_size=3)

    def test_micro_batches_are_whole_on_every_rank(self):
        assert faults(data__batch_size="8", data__micro_batch_size="4", deployment__num_train_gpus="3") == {
            "data.batch_size": "8 is not a multiple of data.micro_batch_size x data-parallel ranks = 4 x 3 (3 workers)"
        }
        assert (
            sft(data__batch_size="8", data__micro_batch_size="4", deployment__num_train_gpus="2").data.batch_size == 8
        )


class TestLayout:
    """Replicas, shards and shares of a row over the workers."""

    @pytest.mark.parametrize(
        ("flags", "key", "message"),
        [
            ({"model__cp": "3"}, "model.cp", "4 workers are not a multiple of 3 shares of a row"),
            ({"model__dp_replicate": "3"}, "model.dp_replicate", "4 workers are not a multiple of 3 replicas"),
            (
                {"model__dp_replicate": "4", "model__cp": "2"},
                "model.dp_replicate",
                "4 workers are not a multiple of 4 replicas x 2 shares of a row",
            ),
        ],
    )
    def test_workers_are_whole_groups(self, flags: dict[str, str], key: str, message: str):
        assert faults(**flags, deployment__num_train_gpus="4", data__seq_len="48") == {key: message}
        scored = {"max_steps": "0", "val__sets": '["a"]', "val__data_dir": "there"}
        assert faults(**flags, **scored, deployment__num_train_gpus="4", data__seq_len="48")[key] == message

    def test_one_worker_is_no_group(self):
        found = faults(model__cp="2", deployment__num_train_gpus="1", data__seq_len="48")
        assert found == {"model.cp": "1 worker is not a multiple of 2 shares of a row"}

    def test_rows_are_cut_into_equal_shares(self):
        """Rings take two chunks of a row for each rank; whatever is seen of rows counts, and only what is."""
        val = {"val__sets": '[{"name": "b", "path": "there", "seq_lens": [16, 18]}]', "val__interval": "1"}
        flags = val | {"model__cp": "4", "deployment__num_train_gpus": "4"}
        why = "the ranks' shares would differ"
        assert faults(**flags, data__seq_len="20") == {"val.sets": f"18 is not a multiple of model.cp = 4: {why}"}
        flags |= {"model__cp_style": "ring", "val__sets": val["val__sets"].replace("18", "24")}
        message = f"20 is not a multiple of 2 x model.cp = 8: {why}"
        assert faults(**flags, data__seq_len="20") == {"data.seq_len": message}
        assert sft(**flags, data__seq_len="20", max_steps="0").model.cp == 4
        assert sft(data__seq_len="21", model__cp_style="ring").model.cp == 1

    def test_networks_of_transformers_see_whole_rows(self):
        assert faults(model__cp="2", model__impl="hf") == {
            "model.cp": "2 needs the implementation here: the models of transformers see whole rows"
        }
        assert sft(model__impl="hf").model.cp == 1

    def test_ranks_that_share_rows_deal_none(self):
        flags = {"data__micro_batch_size": "4", "deployment__num_train_gpus": "4"}
        assert sft(**flags, data__batch_size="8", model__cp="2").ranks == 4
        assert faults(**flags, data__batch_size="12", model__cp="2") == {
            "data.batch_size": "12 is not a multiple of data.micro_batch_size x data-parallel ranks = 4 x 2 "
            "(4 workers, 2 of which share each row)"
        }

    def test_deferral_needs_replicas(self):
        message = "needs replicas to add up over: set model.dp_replicate above 1, or leave it out"
        assert faults(model__defer_replicate_sync="true") == {"model.defer_replicate_sync": message}
        by_nodes = {
            "deployment__type": "multi_node",
            "deployment__num_nodes": "2",
            "deployment__gpus_per_node": "2",
            "deployment__nodes_per_fsdp_group": "1",
            "slurm": "{}",
        }
        config = sft(**by_nodes, model__defer_replicate_sync="true", data__batch_size="4", run__name="a")
        assert config.dp_replicate == 2 and config.model.dp_replicate == 1
        got = faults(**by_nodes, model__cp="3", model__defer_replicate_sync="true", data__seq_len="48", run__name="a")
        assert got == {"model.cp": "4 workers are not a multiple of 2 replicas x 3 shares of a row"}


class TestResume:
    def test_needs_a_run(self):
        assert list(faults(resume="{}")) == ["run.name"]
        assert sft(resume__dir="there").run.name is None

    def test_not_together_with_clean(self):
        assert list(faults(resume="{}", run__name="a", clean="true")) == ["clean"]

    def test_the_folder_exists(self):
        assert faults(resume__dir="gone") == {"resume.dir": "gone does not exist"}
        assert faults(resume__dir="file") == {"resume.dir": "file is not a folder"}

    def test_the_step_lies_in_the_run(self):
        flags = {"resume__dir": "there", "max_steps": "10"}
        assert faults(**flags, resume__step="11") == {"resume.step": "11 is past the end, max_steps = 10"}
        assert sft(**flags, resume__step="10").resume is not None
        assert sft(**flags, resume__step="11", ckpt__skip_progress="true").resume is not None

    def test_steps_counted_anew_need_a_run_dir_of_their_own(self):
        assert list(faults(resume="{}", run__name="a", ckpt__skip_progress="true")) == ["ckpt.skip_progress"]


def test_kept_checkpoints_exist():
    assert faults(ckpt__interval="10", ckpt__keep_interval="25") == {
        "ckpt.keep_interval": "25 is not a multiple of interval = 10: most of these steps have none"
    }
    assert sft(ckpt__interval="10", ckpt__keep_interval="20").ckpt is not None


class TestFolders:
    def test_data(self):
        got = faults(data__type="tokens", data__paths='["there", "gone", "file"]')
        assert got == {"data.paths": "gone does not exist"}

    @pytest.mark.parametrize("path", ["x" * 5000, "a\\u0000b"])
    def test_names_that_no_file_system_takes(self, path: str):
        assert list(faults(data__type="tokens", data__paths=f'["{path}"]')) == ["data.paths"]

    def test_validation_sets(self):
        assert faults(val__interval="5", val__sets='[{"name": "a", "path": "gone"}]') == {
            "val.sets": "gone does not exist"
        }
        assert faults(val__interval="5", val__sets='["a"]', val__data_dir="there") == {
            "val.sets": "there/a does not exist, and there is no a.jsonl, .jsonl.gz, .json or .parquet beside it"
        }
        assert faults(val__interval="5", val__sets='["a"]', val__data_dir="gone") == {
            "val.data_dir": "gone does not exist"
        }
        assert (
            sft(val__interval="5", val__sets='["there", {"name": "b", "path": "file"}]', val__data_dir=".").val
            is not None
        )


class TestValidation:
    SETS = '[{"name": "a", "path": "there"}]'

    def test_something_says_when(self):
        assert list(faults(val__sets=self.SETS)) == ["val.interval"]
        assert sft(val__sets=self.SETS, val__eval_on_end="true").val is not None
        assert sft(val__sets=self.SETS, eval_snapshots__interval="5").val is not None  # eval-worker scores them

    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a"])
    def test_a_name_is_a_folder_or_a_file_of_rows(self, name: str):
        Path("there", name).touch()
        assert sft(val__interval="5", val__sets='["a"]', val__data_dir="there").val is not None

    def test_names_need_a_folder_and_differ(self):
        assert list(faults(val__interval="5", val__sets='["a"]')) == ["val.sets"]
        assert list(
            faults(val__interval="5", val__sets='["there", {"name": "there", "path": "."}]', val__data_dir=".")
        ) == ["val.sets"]

    def test_a_path_is_no_name(self):
        assert list(faults(val__interval="5", val__sets='["../a"]', val__data_dir=".")) == ["val.sets.0"]

    def test_lengths(self):
        assert faults(val__interval="5", val__sets=self.SETS, val__seq_lens="[1]") == {
            "val.seq_lens.0": "must be at least 2, got 1"
        }
        assert list(faults(val__interval="5", val__sets=self.SETS, val__seq_lens="[4, 4]")) == ["val.seq_lens"]
        assert list(
            faults(val__interval="5", val__sets=self.SETS, val__seq_lens="[4, 8]", val__micro_batch_tokens="7")
        ) == ["val.micro_batch_tokens"]
        assert (
            sft(val__interval="5", val__sets=self.SETS, val__seq_lens="[4, 8]", val__micro_batch_tokens="8").val
            is not None
        )


def test_each_fault_says_which_file_or_flag_gave_the_value():
    Path("a.toml").write_text("[optim]\nlr = 1e-4\n[scheduler]\ntype = 'cosine'\nmin_lr = 1e-3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve([*(f"--{key}={text}" for key, text in RUN.items()), "@", "a.toml", "--resume", "--clean"])
    assert render_error(caught.value).splitlines() == [
        "scheduler.min_lr (a.toml): 0.001 is above the peak, optim.lr = 0.0001",
        "clean (flag --clean): would delete what [resume] goes on from; give only one of them",
        "run.name: is missing: the name of the run to go on with; or give resume.dir to fork another",
    ]
