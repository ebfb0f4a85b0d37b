"""`sft --max-steps 0` up to the start of its workers."""

import json

from trainer.sft import run_sft


def write_config(bench, path, **tables):
    config = bench.config("unused", max_steps=0, run=None, **tables)
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    return path


def test_a_dry_run_says_what_would_be_scored(bench, own, tmp_path, answer_of):
    path = write_config(bench, tmp_path / "a.json")
    before = bench.contents(own)
    answer = answer_of(run_sft, "@", path, "--run.name", "own", "--resume", "--dry-run")
    assert answer.code == 0, answer.err
    assert answer.lines[:4] == [
        f"resume: from {own}/checkpoints/step_4",
        f"plan: no training (max_steps = 0); the weights of {own}/checkpoints/step_4, scored by 1 worker on",
        "plan:   texts, in windows of 8 and 32 tokens",
        "plan:   pairs, in windows of 8 and 32 tokens",
    ]
    changed = {name for name, content in bench.contents(own).items() if before.get(name) != content}
    assert changed == {"configs/dry_run/sft.json"}
