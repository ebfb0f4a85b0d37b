"""Made-up chats with the lengths of real ones, and how well they pack.

    uv run python benchmarks/chat_lengths.py --out benchmarks/results/chat_packing.json   # padding of each packing
    uv run python benchmarks/chat_lengths.py --chats 10000 --mix chat --write chats.jsonl # conversations to tokenise

Lengths of instruction and chat data are close to a lognormal mixture: many short answers, fewer long talks, a tail far
beyond any row. `lengths` draws from such mixtures; `conversations` writes messages of about such lengths, in English
words of the standard library's help texts. Both depend on the seed alone.
"""

import argparse
import datetime
import json
import os
import platform
import pydoc_data.topics
import time
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.chat.plan import RowPlan
from trainer.data.packing import one_each, pack, pack_in_order

TOKENS_PER_WORD = 1.4
"""Of English under common byte-level vocabularies."""

PACKINGS = ("best_fit", "sequential", "none")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Conversations of one kind. Their lengths are lognormal."""

    share: float
    median: float
    """Tokens."""

    sigma: float
    turns: int
    """Most questions with an answer."""


MIXES = {
    # One question and answer, talks of several turns, a few very long ones: about 500 tokens on average.
    "chat": (
        Kind(share=0.7, median=220, sigma=0.8, turns=1),
        Kind(share=0.27, median=700, sigma=0.6, turns=6),
        Kind(share=0.03, median=3000, sigma=0.7, turns=12),
    ),
    # Short questions with long reasoning before the answer: about 3,000 tokens on average.
    "reasoning": (
        Kind(share=0.2, median=400, sigma=0.7, turns=1),
        Kind(share=0.8, median=2600, sigma=0.9, turns=1),
    ),
}


def lengths(count: int, *, mix: str = "chat", seed: int = 0) -> np.ndarray:
    """(count,) int64: tokens of conversations, at least 8."""
    return _draw(count, mix, seed)[1]


def conversations(count: int, *, mix: str = "chat", seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `messages`: a system message in every third one, questions, and answers four times as long."""
    kinds, sizes = _draw(count, mix, seed)
    generator = np.random.default_rng([seed, 1])
    words = [word for word in " ".join(pydoc_data.topics.topics.values()).split(" ") if word.strip()]
    starts = generator.integers(0, len(words), count).tolist()
    turns = (1 + generator.random(count) * np.array([kind.turns for kind in MIXES[mix]])[kinds]).astype(int).tolist()
    with_system = (generator.random(count) < 1 / 3).tolist()
    rows = []
    for start, tokens, number, has_system in zip(starts, sizes.tolist(), turns, with_system, strict=True):
        text = chain(words[start:], cycle(words))
        per_turn = max(2, int(tokens / TOKENS_PER_WORD / number))
        messages = [{"role": "system", "content": "You answer questions about Python."}] if has_system else []
        for _ in range(number):
            messages.append({"role": "user", "content": " ".join(islice(text, max(1, per_turn // 5)))})
            messages.append({"role": "assistant", "content": " ".join(islice(text, max(1, per_turn * 4 // 5)))})
        rows.append({"messages": messages})
    return rows


def _draw(count: int, mix: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Kind and tokens of each conversation."""
    generator = np.random.default_rng(seed)
    kinds = generator.choice(len(MIXES[mix]), count, p=[kind.share for kind in MIXES[mix]])
    medians, sigmas = (np.array([getattr(kind, name) for kind in MIXES[mix]]) for name in ("median", "sigma"))
    sizes = np.exp(generator.normal(np.log(medians)[kinds], sigmas[kinds]))
    return kinds, np.maximum(8, sizes).astype(np.int64)


def padding(sizes: np.ndarray, seq_len: int, packing: str) -> float:
    """Share of padding in the rows of samples cut to `seq_len`."""
    cut = np.minimum(sizes, seq_len)
    match packing:
        case "best_fit":
            rows = pack(cut, seq_len)
        case "sequential":
            rows = pack_in_order(cut, seq_len)
        case _:
            rows = one_each(len(cut))
    return 1 - float(cut.sum()) / (rows.num_rows * seq_len)


def plan_seconds(count: int, packing: str) -> float:
    """How long it takes to plan the rows of `count` chats."""
    sizes = np.minimum(lengths(count), 8192)
    start = time.perf_counter()
    RowPlan(sizes, seq_len=8192, packing=packing, seed=0, shuffle=True)  # type: ignore[arg-type]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=100_000)
    parser.add_argument("--mix", choices=MIXES, default="chat", help="of the conversations that are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="JSON lines file for conversations; nothing is measured then")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 4096, 8192, 32768])
    parser.add_argument("--plan", type=int, default=10_000_000, help="conversations whose rows are planned, for speed")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()

    if args.write is not None:
        rows = conversations(args.chats, mix=args.mix, seed=args.seed)
        args.write.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows):,} conversations in {args.write}")
        return
    measured = {}
    for mix in MIXES:
        sizes = lengths(args.chats, mix=mix, seed=args.seed)
        measured[mix] = {"mean_tokens": round(float(sizes.mean()), 1), "longest": int(sizes.max()), "padding": {}}
        for seq_len in args.seq_len:
            shares = {packing: round(padding(sizes, seq_len, packing), 5) for packing in PACKINGS}
            measured[mix]["padding"][str(seq_len)] = shares
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "numpy": np.__version__,
        "chats": args.chats,
        "mixes": measured,
        "planned": args.plan,
        "plan_seconds": {packing: round(plan_seconds(args.plan, packing), 2) for packing in PACKINGS},
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
