"""Small runs with checkpoints, trained in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 11,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def train_run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Iterator[Callable[..., Path]]:
    """`train_run("name", arch={...}, ckpt={...}, ...)`: train 4 steps, checkpoints at 2 and 4; gives the run directory.

    The tokenizer is the tiny one; rows are made up.
    """
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        patch.setenv(name, value)
    shards_need_no_tokenizer = {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0}

    def train(name: str, arch: dict[str, Any] | None = None, **tables: Any) -> Path:
        model = {"arch": ARCH | (arch or {}), "init": {"std": 0.2}} | tables.pop("model", {})
        values = {"model": model, "data": shards_need_no_tokenizer, "tokenizer": {"name": str(tiny_tokenizer)}}
        values |= {"output_dir": str(folder), "run": {"name": name}, "max_steps": 4, "optim": {"lr": 0.01}}
        config = SFTConfig.model_validate(values | {"ckpt": {"interval": 2}} | tables)
        (folder / name).mkdir(exist_ok=True)
        trainer = Trainer(config, Run(dir=folder / name, attempt=0, stop=StopSignal()))
        try:
            trainer.run()
        finally:
            trainer.close()
        return folder / name

    yield train
    patch.undo()
