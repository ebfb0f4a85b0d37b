"""Training of a byte-level BPE tokenizer on the documents that are not held out."""

import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from datatrove.data import Document

from configs.tokenize import TrainTokenizerConfig
from trainer.errors import RunError
from trainer.tokenize.heldout import HeldoutRule


def train_tokenizer(
    config: TrainTokenizerConfig, texts: Iterator[str], folder: Path, say: Callable[[str], None]
) -> None:
    """Train on `texts` and write a Hugging Face tokenizer folder, in one piece. The same texts give the same files.

    Raises:
        RunError: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    first = next(texts, None)
    if first is None:
        raise RunError("there is no text to train a tokenizer on: every document is empty, dropped or held out")

    def all_texts() -> Iterator[str]:
        yield first
        yield from texts

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.eos_token, config.pad_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(), trainer)
    if tokenizer.get_vocab_size() < config.vocab_size:
        say(f"the text gave only {tokenizer.get_vocab_size()} of the {config.vocab_size} tokens asked for")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=config.eos_token,
        pad_token=config.pad_token,
        clean_up_tokenization_spaces=False,
    )
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    fast.save_pretrained(unfinished)
    unfinished.replace(folder)


def training_texts(
    sources: Sequence[Generator[Document, None, None]],
    heldout: HeldoutRule,
    max_bytes: int,
    on_read: Callable[[int], None],
) -> Iterator[str]:
    """Texts of at most `max_bytes` bytes in all, an equal share from the start of each source; what a source leaves of
    its share the later ones may use. The document that would pass the bound is cut there.

    Args:
        on_read: told the bytes given so far.
    """
    used = 0
    for number, source in enumerate(sources):
        bound = used + -(-(max_bytes - used) // (len(sources) - number))
        with closing(source):
            for document in source:
                raw = document.text.encode()
                if heldout.is_held_out(raw):
                    continue
                text = document.text if used + len(raw) <= bound else raw[: bound - used].decode(errors="ignore")
                used = min(used + len(raw), bound)
                if text:
                    yield text
                on_read(used)
                if used == bound:
                    break
