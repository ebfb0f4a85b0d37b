"""Bits per byte of a byte-bigram model on the held-out documents: the bar that the trained model must pass.

    uv run python examples/quickstart/bigram.py

It counts byte pairs in the training documents and adds one to each count, so P(b | a) = (n(a, b) + 1) / (n(a) + 256).
Documents are read back from the shards. The first byte of a document has no byte before it and is not scored.
"""

from pathlib import Path

import numpy as np

from trainer.data.shards import TokenPool
from trainer.tokenizer import load_tokenizer

HERE = Path(__file__).parent


def main() -> None:
    counts = count_pairs(read_documents(HERE / "train"))
    probabilities = (counts + 1) / (counts.sum(axis=1, keepdims=True) + 256)
    heldout = count_pairs(read_documents(HERE / "heldout"))
    bits = -(heldout * np.log2(probabilities)).sum()
    print(f"byte bigram: {bits / heldout.sum():.4f} bits per byte over {heldout.sum()} held-out bytes")


def read_documents(folder: Path) -> list[bytes]:
    """The text of each document, UTF-8."""
    tokenizer = load_tokenizer(str(HERE / "tokenizer"))
    pool = TokenPool([folder])
    ids = pool.read(0, pool.num_tokens)
    documents = np.split(ids, pool.document_ends(0, pool.num_tokens))
    # skipping the special tokens drops the EOS that ends each document
    texts = [str(tokenizer.decode(document, skip_special_tokens=True)) for document in documents]
    return [text.encode() for text in texts if text]


def count_pairs(documents: list[bytes]) -> np.ndarray:
    """(256, 256) int64: how often byte b follows byte a inside a document."""
    counts = np.zeros(256 * 256, np.int64)
    for document in documents:
        values = np.frombuffer(document, np.uint8).astype(np.int64)
        counts += np.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


if __name__ == "__main__":
    main()
