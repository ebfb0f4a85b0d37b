"""Writes the data of this folder: `tokenizer/`, `train/` and `heldout/`, from Python's own standard library.

    uv run python examples/quickstart/make_shards.py --output-dir outputs/quickstart-data

The shipped data came from CPython 3.11.7; another version has other files and gives other shards. Documents are the
modules (tests and tables left out) and the topics of `help()`. Which documents are held out depends on their path
alone, so a document never moves from one side to the other when the script or Python changes.
"""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TOKENIZER_NAME = "quickstart"
EOS = "<|endoftext|>"
VOCAB_SIZE = 4096
SEED = 0
HELDOUT_SHARE = 0.04

LEFT_OUT = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "turtledemo", "lib2to3", "distutils", "tkinter", "__phello__"),
    # encodings are tables of numbers; pydoc_data holds the topics, which are read as texts of their own
    *("encodings", "pydoc_data"),
}
MIN_CHARS, MAX_CHARS = 500, 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent)
    output_dir: Path = parser.parse_args().output_dir

    documents = drop_near_duplicates(read_documents())
    train = {path: text for path, text in documents.items() if not is_held_out(path)}
    heldout = {path: text for path, text in documents.items() if is_held_out(path)}

    tokenizer_dir = output_dir / "tokenizer"
    train_tokenizer(train).save_pretrained(tokenizer_dir)
    for name, part in (("train", train), ("heldout", heldout)):
        write_shards(part, output_dir / name, tokenizer_dir / "tokenizer.json")
        num_bytes = sum(len(text.encode()) for text in part.values())
        num_tokens = sum(file.stat().st_size for file in (output_dir / name).glob("*.ds")) // 2
        print(f"{name}: {len(part)} documents, {num_bytes} bytes, {num_tokens} tokens")
    check_portable(output_dir)


def read_documents() -> dict[str, str]:
    """Path of each document, with `/`, relative to the standard library, and its text."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = {f"pydoc_data/topics/{name}": text for name, text in topics.items()}
    for file in stdlib.rglob("*.py"):
        path = file.relative_to(stdlib)
        if LEFT_OUT.isdisjoint(path.parts) and not path.parts[0].startswith(("config-", "_sysconfigdata")):
            try:
                documents[path.as_posix()] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few old modules declare another encoding
    return {path: documents[path] for path in sorted(documents) if MIN_CHARS <= len(documents[path]) <= MAX_CHARS}


def drop_near_duplicates(documents: dict[str, str]) -> dict[str, str]:
    """Without documents of which longer ones already hold half: many topics repeat parts of others, and a held-out
    document must not stand in the training text."""
    seen: set[str] = set()
    kept: set[str] = set()
    for path, text in sorted(documents.items(), key=lambda item: (-len(item[1]), item[0])):
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 20}
        if len(lines & seen) <= len(lines) / 2:
            kept.add(path)
            seen |= lines
    return {path: text for path, text in documents.items() if path in kept}


def is_held_out(path: str) -> bool:
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def train_tokenizer(documents: dict[str, str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB_SIZE tokens; EOS has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def write_shards(documents: dict[str, str], folder: Path, tokenizer_file: Path) -> None:
    """One shard of these documents in a seeded random order, each followed by EOS."""
    for stale in folder.glob("*.ds*"):
        stale.unlink()
    writer = DocumentTokenizer(
        output_folder=str(folder), tokenizer_name_or_path=str(tokenizer_file), eos_token=EOS, seed=SEED
    )
    _ = writer.tokenizer  # loaded from the path now, because the name given next goes into the metadata
    writer.tokenizer_name_or_path = TOKENIZER_NAME
    for _ in writer.run(as_documents(documents)) or ():
        pass


def as_documents(documents: dict[str, str]) -> Iterator[Document]:
    for path, text in documents.items():
        yield Document(text=text, id=path)


def check_portable(folder: Path) -> None:
    """No path of this machine may lie in files that others get."""
    machine_paths = {str(Path.home()), sysconfig.get_paths()["stdlib"], str(Path.cwd()), str(folder.resolve())}
    for file in folder.rglob("*.*"):
        if file.is_file() and (file.parent != folder):
            content = file.read_bytes()
            for path in machine_paths:
                if path.encode() in content:
                    raise SystemExit(f"{file} holds a path of this machine: {path}")


if __name__ == "__main__":
    main()
