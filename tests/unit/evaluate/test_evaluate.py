"""Scoring without training, in this process: its numbers are those of training, and nothing else changes."""

import logging
import re

import pytest
import torch

from configs.errors import ConfigError
from trainer.errors import RunError
from trainer.evaluate import evaluate
from trainer.preflight import preflight_scoring
from trainer.validation import Validation


def test_a_run_is_scored_at_any_of_its_steps(bench, own):
    """Older steps too, and the newest where none is named: exactly what training's own rounds gave."""
    during = {record["step"]: bench.scores(record) for record in bench.records(own) if bench.scores(record)}
    assert sorted(during) == [2, 4]
    assert len(during[2]) == 12
    assert during[2] != during[4]
    checkpoints = bench.contents(own / "checkpoints")
    assert bench.score("own", resume={"step": 2}) == [{"step": 2} | during[2]]
    assert bench.score("own", resume={}) == [{"step": 4} | during[4]]
    assert bench.contents(own / "checkpoints") == checkpoints


def test_another_suite_is_added_to_the_record(bench, own):
    before = bench.contents(own)
    suite = {"sets": bench.val["sets"][:1], "seq_lens": [16], "save_arrays": True}
    (record,) = bench.score("own", resume={}, val=suite)
    assert sorted(record) == ["step", "val/texts/bpb@16", "val/texts/loss@16", "val/texts/perplexity@16"]
    added = {name for name, content in bench.contents(own).items() if before.get(name) != content}
    assert added == {"metrics.jsonl", "val/step_4/texts.parquet"}


def test_a_training_that_goes_on_still_does_its_own_round(bench, own):
    """A scoring of its last step is not taken for the round that the killed run had no time for."""
    lines = (own / "metrics.jsonl").read_text().splitlines(keepends=True)
    own_round = bench.records(own)[-1]
    (own / "metrics.jsonl").write_text("".join(lines[:-1]))
    suite = {"sets": bench.val["sets"][:1], "seq_lens": [16]}
    bench.score("own", resume={}, val=suite)
    bench.train("own", resume={})
    made_up = bench.records(own)[-1]
    assert made_up["step"] == 4
    assert "time/val" in made_up
    assert bench.scores(made_up) == bench.scores(own_round)


def test_a_run_is_scored_from_elsewhere(bench, trained):
    """With the step of its checkpoint; of the run, which may be alive, nothing is touched."""
    before = bench.contents(trained)
    (record,) = bench.score("elsewhere", resume={"dir": str(trained), "step": 2})
    (during,) = [record for record in bench.records(trained) if record["step"] == 2]
    assert record["step"] == 2
    assert bench.scores(record) == bench.scores(during)
    assert record["params/num_params"] == 16240
    assert record["time/val"] > 0
    assert bench.contents(trained) == before


def test_drawn_weights_are_scored_at_step_0(bench):
    """As `eval_on_start` scores them; no data is named, read or needed, and no checkpoint or snapshot is written."""
    training = bench.train("start", val={"eval_on_start": True}, max_steps=1, ckpt=None)
    first = bench.records(training)[0]
    (record,) = bench.score("drawn", data=None, eval_snapshots={"interval": 1})
    assert record["step"] == 0
    assert bench.scores(record) == bench.scores(first)
    assert sorted(path.name for path in (bench.folder / "drawn").iterdir()) == ["metrics.jsonl"]


def test_missing_training_data_does_not_matter(bench):
    (record,) = bench.score("gone", data={"type": "tokens", "paths": ["gone"]})
    assert len(bench.scores(record)) == 12


def test_a_checkpoint_stands_for_a_model(bench, trained):
    """At step 0: nobody knows whose step it would be."""
    model = {"arch": None, "init": None, "name": str(trained / "checkpoints" / "step_2")}
    (record,) = bench.score("by_name", model=model, data=None)
    (during,) = [record for record in bench.records(trained) if record["step"] == 2]
    assert record["step"] == 0
    assert bench.scores(record) == bench.scores(during)


def test_transformers_own_model_gives_the_same(bench, own):
    (ours,) = bench.score("own", resume={})
    (theirs,) = bench.score("own", resume={}, model={"impl": "hf"})
    assert bench.scores(theirs) == pytest.approx(bench.scores(ours), rel=1e-5)


def test_constant_weights_give_the_loss_of_guessing(bench):
    (record,) = bench.score("debug", model={"init": None, "debug": {"random_init": True, "num_layers": 1}})
    assert record["val/texts/loss@8"] == pytest.approx(torch.log(torch.tensor(384.0)).item(), rel=1e-5)


def test_the_vocabulary_of_a_model_is_scored_as_it_is(bench, tmp_path, caplog):
    """A tokenizer with more ids than the model has rows makes a training grow them; a scoring would have to give rows
    that mean nothing a share of the likelihood."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    fields = {name: value for name, value in bench.arch.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(Qwen3Config(**fields | {"vocab_size": 300})).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(bench.tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "model")
    caplog.set_level(logging.INFO)
    tables = {"tokenizer": None, "data": None, "model": {"arch": None, "init": None, "name": str(tmp_path / "model")}}
    config = bench.config("as_stored", max_steps=0, **tables)
    plan = preflight_scoring(config, run_dir=bench.folder / "as_stored", world_size=2, say=print)
    (record,) = bench.score("as_stored", **tables)
    assert record["params/num_embedding_params"] == 2 * 300 * 16
    assert "vocabulary:" not in caplog.text
    assert plan == [
        f"plan: no training (max_steps = 0); the weights of {tmp_path / 'model'}, scored by 2 workers on",
        "plan:   texts, in windows of 8 and 32 tokens",
        "plan:   pairs, in windows of 8 and 32 tokens",
    ]


@pytest.mark.parametrize("passes", [0, 2])
def test_a_stop_records_nothing(bench, own, caplog, monkeypatch, passes):
    caplog.set_level(logging.INFO)
    config = bench.config("own", max_steps=0, resume={}, val={"save_arrays": True})
    run = bench.run(config)
    before = bench.contents(own)
    real = Validation.run

    def stopped(self, model, on_progress, leave, step):
        asked = 0

        def leave_then():
            nonlocal asked
            asked += 1
            if asked > passes:
                run.stop._requested = True
            return leave()

        return real(self, model, on_progress, leave_then, step=step)

    monkeypatch.setattr(Validation, "run", stopped)
    evaluate(config, run)
    assert bench.contents(own) == before
    assert "stopped on request before all was scored: nothing is recorded" in caplog.text


def test_the_end_says_the_numbers_and_where_they_are(bench, own, caplog):
    caplog.set_level(logging.INFO)
    (record,) = bench.score("own", resume={})
    told = [entry.getMessage() for entry in caplog.records if entry.name.startswith("trainer")]
    table = [line for line in told if "| val " in line]
    assert table[0] == (
        f"step 4 | val texts @8 | loss {record['val/texts/loss@8']:.4f} | "
        f"perplexity {record['val/texts/perplexity@8']:.4f} | bpb {record['val/texts/bpb@8']:.4f}"
    )
    assert len(table) == 4
    assert re.fullmatch(rf"done: scored in .* s; recorded at step 4 in {own}/metrics.jsonl", told[-1])


def test_a_damaged_checkpoint_is_named(bench, own):
    for path in (own / "checkpoints" / "step_4").glob("*.distcp"):
        content = bytearray(path.read_bytes())
        content[-8:] = bytes(8 * [255])
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"step_4 is damaged"):
        bench.score("own", resume={"step": 4})
    (record,) = bench.score("own", resume={})  # the newest whole one
    assert record["step"] == 2


def faults(bench, name, **tables):
    config = bench.config(name, max_steps=0, **tables)
    with pytest.raises(ConfigError) as caught:
        preflight_scoring(config, run_dir=bench.folder / name, world_size=1, say=print)
    return [f"{fault.key}: {fault.message}" for fault in caught.value.faults]


def test_what_cannot_be_scored_is_found_before_anything_is_started(bench, trained):
    assert faults(bench, "trained", resume={"step": 3}) == [
        f"resume.step: there is no step_3 in {trained}/checkpoints; there are step_2, step_4"
    ]
    (wrong_shape,) = faults(bench, "trained", resume={}, model={"arch": bench.arch | {"intermediate_size": 28}})
    assert wrong_shape.startswith(f"resume: checkpoint {trained}/checkpoints/step_4 does not fit this run: different")
    wrong_set = {"sets": [{"name": "texts", "path": str(bench.tokenizer)}]}
    found = faults(bench, "trained", resume={"step": 3}, val=wrong_set)
    assert [fault.split(":")[0] for fault in found] == ["val.sets", "resume.step"]


def test_the_plan_of_a_checkpoint(bench, trained):
    said = []
    config = bench.config("new", max_steps=0, resume={"dir": str(trained)})
    plan = preflight_scoring(config, run_dir=bench.folder / "new", world_size=1, say=said.append)
    newest = trained / "checkpoints" / "step_4"
    assert plan[0] == f"plan: no training (max_steps = 0); the weights of {newest}, scored by 1 worker on"
    assert f"resume: from {newest}" in said
