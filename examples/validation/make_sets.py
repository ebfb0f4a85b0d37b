"""Writes held-out sets of every kind that is stored as rows, from the quickstart's held-out documents.

    uv run python examples/validation/make_sets.py

| file in outputs/validation | kind | asks |
|---|---|---|
| source.jsonl | text | all of each document |
| names.jsonl | context, continuation | the last name of a line, one that stands in the lines above |
| order.parquet | context, chosen, rejected | a line, or the same line with two neighbouring words exchanged |
| next_line.jsonl | context, choices, answer | which of four lines of the document comes next |

The shards of the quickstart are the fifth kind. The same files come every time. The text is CPython's; its licence lies
beside the quickstart.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.shards import TokenPool
from trainer.tokenizer import load_tokenizer

QUICKSTART = Path(__file__).parents[1] / "quickstart"
CONTEXT_LINES = 8
MIN_LINE = 20
NUM_NAMES, NUM_ORDER, NUM_NEXT_LINE = 150, 100, 60
WRONG_CHOICES = 3

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of a document that is long enough to ask for, with the lines before it."""

    context: str
    line: str
    others: list[str]
    """Lines of the same document that stand neither here nor in the context."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/validation"))
    out: Path = parser.parse_args().out

    documents = read_documents(QUICKSTART / "heldout")
    places = [place for document in documents for place in find_places(document)]
    generator = random.Random(0)
    sets = {
        "source.jsonl": [{"text": text} for text in documents],
        "names.jsonl": draw([row for place in places for row in ask_name(place)], NUM_NAMES, generator),
        "order.parquet": draw([row for place in places for row in ask_order(place)], NUM_ORDER, generator),
        "next_line.jsonl": [ask_next_line(place, generator) for place in draw(places, NUM_NEXT_LINE, generator)],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        write_rows(out / name, rows)
        print(f"{out / name}: {len(rows)} rows with {', '.join(rows[0])}")


def read_documents(folder: Path) -> list[str]:
    """The text of each document of a folder of shards."""
    tokenizer = load_tokenizer(str(QUICKSTART / "tokenizer"))
    pool = TokenPool([folder])
    ids = pool.read(0, pool.num_tokens)
    documents = np.split(ids, pool.document_ends(0, pool.num_tokens))
    # skipping the special tokens drops the EOS that ends each document
    texts = [str(tokenizer.decode(document, skip_special_tokens=True)) for document in documents]
    return [text for text in texts if text]


def find_places(document: str) -> Iterator[Place]:
    """Every line that has some text in it and enough lines before it."""
    lines = document.split("\n")
    for number, line in enumerate(lines):
        if number >= CONTEXT_LINES and len(line.strip()) >= MIN_LINE:
            before = number - CONTEXT_LINES
            near = set(lines[before : number + 1])
            others = [other for other in lines if len(other.strip()) >= MIN_LINE and other not in near]
            if len(others) >= WRONG_CHOICES:
                yield Place(context="\n".join(lines[before:number]), line=line, others=others)


def ask_name(place: Place) -> Iterator[Row]:
    """The last name of the line, where the context has it too."""
    found = re.fullmatch(r"(.*?)(\s?[A-Za-z_]\w{3,})\W*", place.line)
    if found is not None and re.search(rf"\b{found[2].strip()}\b", place.context):
        yield {"context": f"{place.context}\n{found[1]}", "continuation": found[2]}


def ask_order(place: Place) -> Iterator[Row]:
    """The line against itself with two neighbouring words exchanged: those in its middle."""
    words = place.line.split(" ")
    at = [number for number in range(len(words) - 1) if words[number].strip() and words[number + 1].strip()]
    if len(at) >= 3:
        middle = at[len(at) // 2]
        exchanged = [*words[:middle], words[middle + 1], words[middle], *words[middle + 2 :]]
        if exchanged != words:
            yield {"context": place.context, "chosen": f"\n{place.line}", "rejected": "\n" + " ".join(exchanged)}


def ask_next_line(place: Place, generator: random.Random) -> Row:
    """The line among others of its document."""
    choices = [f"\n{line}" for line in draw(place.others, WRONG_CHOICES, generator)]
    answer = generator.randrange(WRONG_CHOICES + 1)
    choices.insert(answer, f"\n{place.line}")
    return {"context": place.context, "choices": choices, "answer": answer}


def draw(items: list, count: int, generator: random.Random) -> list:
    """Some of the items, in their order."""
    return [items[number] for number in sorted(generator.sample(range(len(items)), count))]


def write_rows(path: Path, rows: list[Row]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
