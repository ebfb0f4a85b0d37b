"""The quickstart for chats without training: its data, its tokenizer, its config and its score."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from configs.cli import resolve
from configs.data import SFTDataConfig
from configs.sft import SFTConfig
from models.batch import Batch

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture(scope="module")
def chats(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("chats")


@pytest.fixture(scope="module")
def score(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("score")


@pytest.fixture(scope="module")
def tokenizer(chats: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chats") / "tokenizer"
    chats.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_no_held_out_prompt_is_trained_on(chats: ModuleType, tmp_path: Path) -> None:
    prompts = chats.draw_prompts(chats.NUM_TRAIN + chats.NUM_HELD_OUT)
    assert prompts == chats.draw_prompts(chats.NUM_TRAIN + chats.NUM_HELD_OUT)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 12_200
    lengths = np.bincount([len(prompt) for prompt in prompts[: chats.NUM_HELD_OUT]], minlength=5)
    assert lengths[:2].sum() == 0 and lengths[2:].min() > 30, "as mixed as the training chats"
    chats.write_chats(tmp_path / "chats.jsonl", prompts[:1])
    (line,) = (tmp_path / "chats.jsonl").read_text().splitlines()
    question, answer = json.loads(line)["messages"]
    assert question["content"].removeprefix("Reverse: ").split() == answer["content"].split()[::-1] == prompts[0]


def test_the_tokenizer_writes_chatml_with_two_more_tokens(chats: ModuleType, tokenizer: Any) -> None:
    before = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    assert (len(before), len(tokenizer)) == (4096, 4098)
    assert tokenizer.get_vocab().items() > before.get_vocab().items()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 4096)
    messages = [{"role": "user", "content": "Reverse: state source"}, {"role": "assistant", "content": "source state"}]
    text = (
        "<|im_start|>user\nReverse: state source<|im_end|>\n<|im_start|>assistant\nsource state<|im_end|>\n"
    )  # fmt: skip
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == text.removesuffix("source state<|im_end|>\n")
    assert all(len(tokenizer.encode(f"{space}{word}")) == 1 for word in chats.WORDS for space in ("", " "))


def test_the_config_resolves_once_the_first_run_and_the_chats_are_there(
    chats: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("outputs/quickstart/checkpoints/step_400", "outputs/chats/tokenizer"):
        Path(folder).mkdir(parents=True)
    for name in ("train", "heldout"):
        chats.write_chats(Path(f"outputs/chats/{name}.jsonl"), [["a", "b"]])
    config = resolve(["@", str(QUICKSTART / "chat.toml")]).config
    assert isinstance(config, SFTConfig) and isinstance(config.data, SFTDataConfig)
    assert config.val is not None and config.val.data is not None
    assert (config.run.name, str(config.output_dir)) == ("quickstart-chat", "outputs")
    first = resolve(["@", str(QUICKSTART / "pretrain.toml"), "--data.type", "fake", "--no-val"]).config
    assert isinstance(first, SFTConfig)
    assert config.model.name == f"{first.output_dir}/{first.run.name}/checkpoints/step_{first.max_steps}"


class Backwards:
    """Knows the answer: after the n-th token behind the prompt comes the n-th word from the end, then EOS."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def logits(self, batch: Batch) -> torch.Tensor:
        logits = torch.zeros(*batch.input_ids.shape, len(self.tokenizer))
        for row, ids in enumerate(batch.input_ids.tolist()):
            text = self.tokenizer.decode(ids).split("assistant\n")[0]
            words = text.split("Reverse: ")[1].split("<|im_end|>")[0].split(" ")
            answer = self.tokenizer.encode(" ".join(reversed(words)) + "<|im_end|>")
            start = len(self.tokenizer.encode(text + "assistant\n")) - 1
            for offset, token in enumerate(answer):
                logits[row, start + offset :, token] = 10.0 + offset
        return logits


def test_answers_are_compared_word_for_word(score: ModuleType, tokenizer: Any) -> None:
    lists = [["state", "source"], ["buffer", "code", "python", "filter"], ["node", "queue", "list"]]
    prompts = [[{"role": "user", "content": "Reverse: " + " ".join(words)}] for words in lists]
    assert score.answer(Backwards(tokenizer), tokenizer, prompts) == [" ".join(words[::-1]) for words in lists]


def test_an_answer_without_an_end_is_cut(score: ModuleType) -> None:
    class Endless:
        def logits(self, batch: Batch) -> torch.Tensor:
            return torch.nn.functional.one_hot(batch.input_ids + 1, 64).float()

    assert score.complete(Endless(), [[3, 4], [7]], eos_token_id=9) == [[5, 6, 7, 8, 9], [8, 9]]
    assert score.complete(Endless(), [[3]], eos_token_id=50) == [list(range(4, 20))]
