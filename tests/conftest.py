"""Fixtures that several rooms share: a tiny tokenizer and token shards as datatrove writes them."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# The same inputs in every run of the suite; ONELOOP_SLOW=1 looks at many more, other ones each time.
_SLOW = os.environ.get("ONELOOP_SLOW") == "1"
settings.register_profile(
    "oneloop",
    derandomize=not _SLOW,
    max_examples=3000 if _SLOW else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("oneloop")

EOS = "<|endoftext|>"
PAD = "<|pad|>"
_SYLLABLES = ("ba", "ko", "ri", "tu", "sel", "mon", "ar", "ith", "po", "len", "da", "wis")


def _texts(seed: int, count: int) -> list[str]:
    """Made-up sentences of 1 to about 700 letters: short documents are as common as long ones."""
    generator = np.random.default_rng(seed)
    texts = []
    for size in np.exp(generator.uniform(0, np.log(700), count)).astype(int):
        text = ""
        while len(text) < size:
            text += "".join(generator.choice(_SYLLABLES, generator.integers(1, 4)))
            text += str(generator.choice([" ", " ", " ", ", ", ".\n"]))
        texts.append(text[: max(1, size)])
    return texts


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level BPE tokenizer of 300 tokens: EOS and BOS `<|endoftext|>` (id 0), PAD `<|pad|>` (id 1)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed=0, count=100), trainer)
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD, model_max_length=4096
    ).save_pretrained(folder)
    return folder


def _write_shards(folder: Path, tokenizer: Path, texts: list[str], tokens_per_file: int) -> Path:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(
        str(folder),
        str(tokenizer / "tokenizer.json"),
        eos_token=EOS,
        seed=0,
        max_tokens_per_file=tokens_per_file,
    )
    assert step.tokenizer is not None  # loads it, so that the metadata can carry a name instead of this machine's path
    step.tokenizer_name_or_path = "tiny"

    def documents() -> Iterator[Document]:
        for i, text in enumerate(texts):
            yield Document(text=text, id=str(i))

    step.run(documents())
    return folder


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Folder of several shards of 200 documents, as datatrove's DocumentTokenizer writes them, EOS appended."""
    return _write_shards(tmp_path_factory.mktemp("shards"), tiny_tokenizer, _texts(seed=1, count=200), 4000)


@pytest.fixture(scope="session")
def tiny_heldout(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Folder of shards of 40 other documents."""
    return _write_shards(tmp_path_factory.mktemp("heldout"), tiny_tokenizer, _texts(seed=2, count=40), 4000)
