"""The quickstart's config and its generation script, without training."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from configs.cli import resolve
from models.batch import Batch

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def generation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_generate", QUICKSTART / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counting:
    """The next token is the last one plus one."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def logits(self, batch: Batch) -> torch.Tensor:
        self.lengths.append(batch.input_ids.shape[1])
        assert batch.position_ids[0].tolist() == list(range(batch.input_ids.shape[1]))
        return 50.0 * torch.nn.functional.one_hot(batch.input_ids + 1, 32).float()


def generate(generation: ModuleType, model: Counting, **options: float) -> list[int]:
    defaults = {"max_new_tokens": 5, "window": 4, "temperature": 0, "eos_token_id": 31}
    return generation.generate(model, [3, 4], generator=torch.Generator().manual_seed(0), **{**defaults, **options})


def test_greedy_text_ends_at_the_limit_and_sees_a_window(generation: ModuleType) -> None:
    model = Counting()
    assert generate(generation, model) == [3, 4, 5, 6, 7, 8, 9]
    assert model.lengths == [2, 3, 4, 4, 4]


def test_text_ends_before_eos(generation: ModuleType) -> None:
    assert generate(generation, Counting(), eos_token_id=7) == [3, 4, 5, 6]


def test_sampling_follows_the_distribution(generation: ModuleType) -> None:
    assert generate(generation, Counting(), temperature=1.0) == [3, 4, 5, 6, 7, 8, 9]
    assert generate(generation, Counting(), temperature=1000.0) != [3, 4, 5, 6, 7, 8, 9]


def test_the_config_resolves_and_its_paths_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(QUICKSTART.parents[1])
    config = resolve(["@", "examples/quickstart/pretrain.toml"]).config
    assert (config.run.name, str(config.output_dir)) == ("quickstart", "outputs")
    assert config.tokenizer.name is not None and Path(config.tokenizer.name).is_dir()
    assert config.val is not None and config.ckpt is not None
    paths = [*config.data.paths, *(entry.path for entry in config.val.sets if not isinstance(entry, str))]  # type: ignore[union-attr]
    assert all(path.is_dir() and not path.is_absolute() for path in paths)
