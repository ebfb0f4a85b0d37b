"""Writes the text of the quickstart, one document per line, from Python's own standard library.

    uv run python examples/quickstart/corpus.py
    uv run tokenize @ examples/quickstart/tokenize.toml --output-dir outputs/stdlib

The shipped data came from CPython 3.11.7; another version has other files and gives other shards. Documents are the
modules (tests and tables left out) and the topics of `help()`.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "turtledemo", "lib2to3", "distutils", "tkinter", "__phello__"),
    # encodings are tables of numbers; pydoc_data holds the topics, which are read as texts of their own
    *("encodings", "pydoc_data"),
}
MIN_CHARS, MAX_CHARS = 500, 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/stdlib.jsonl"))
    out: Path = parser.parse_args().out

    documents = drop_near_duplicates(read_documents())
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for path, text in documents.items():
            file.write(json.dumps({"path": path, "text": text}) + "\n")
    num_bytes = sum(len(text.encode()) for text in documents.values())
    print(f"{out}: {len(documents)} documents, {num_bytes} bytes of text")


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


if __name__ == "__main__":
    main()
