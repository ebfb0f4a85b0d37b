"""Adapters that are scored without being trained: their base from its files, they from the checkpoint."""

import json

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.evaluate import evaluate
from trainer.preflight import preflight_scoring
from trainer.run import Run, StopSignal

VAL = {"seq_lens": [16], "micro_batch_tokens": 32}


@pytest.fixture
def val(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("kori ba selmon", "arith po len dawis")))
    return VAL | {"sets": [{"name": "texts", "path": str(path)}]}


def records(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in record.items() if name == "step" or name.startswith("val/")}
        for record in map(json.loads, lines)
    ]


def scoring(run_dir, **tables):
    """A config that scores the run as it was trained, but for these tables."""
    values = {"model": {"lora": {"rank": 4, "alpha": 6.0, "modules_to_save": ["lm_head"]}}, "max_steps": 0}
    values |= {"output_dir": str(run_dir.parent), "run": {"name": run_dir.name}}
    model = values["model"] | {"compute_dtype": "float32"} | tables.pop("model", {})
    return SFTConfig.model_validate(values | tables | {"model": model})


def test_adapters_of_each_checkpoint_are_scored(train_lora, base_folder, tiny_tokenizer, val):
    run_dir = train_lora("scored", val=val | {"interval": 2, "eval_on_start": True})
    first, *_ = during = [record for record in records(run_dir) if len(record) > 1]
    assert [record["step"] for record in during] == [0, 2, 4]
    common = {"model": {"name": str(base_folder)}, "tokenizer": {"name": str(tiny_tokenizer)}, "val": val}
    for step in (2, 4):
        evaluate(scoring(run_dir, resume={"step": step}, **common), Run(dir=run_dir, attempt=1, stop=StopSignal()))
    assert records(run_dir)[-2:] == during[1:]

    # Before training, adapters change nothing: the base's own score.
    (run_dir.parent / "base").mkdir()
    run = Run(dir=run_dir.parent / "base", attempt=0, stop=StopSignal())
    evaluate(scoring(run.dir, **common), run)
    evaluate(
        scoring(run.dir, **common | {"model": {"name": str(base_folder), "lora": None}}),
        run,
    )
    with_adapters, alone = records(run.dir)
    assert with_adapters == alone == first

    other = {"model": {"name": str(base_folder), "lora": {"rank": 2, "alpha": 6.0, "modules_to_save": ["lm_head"]}}}
    with pytest.raises(ConfigError) as caught:
        config = scoring(run_dir, resume={}, **common | other)
        preflight_scoring(config, run_dir=run_dir, world_size=1, say=print)
    assert [fault.key for fault in caught.value.faults] == ["model.lora.rank"]
