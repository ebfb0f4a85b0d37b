"""Speed of the data path: rows per second that one process reads from a token pool through the loader of training.

    uv run python benchmarks/rows.py --out benchmarks/results/rows.json

Writes a pool of random ids with documents of random lengths to a temporary folder (--tokens, 2 bytes each), reads
steps of shuffled rows, with their digests, and compares with what a model eats (--model-tokens-per-second: the
1b shape on an H200, see README.md). Batches are not page-locked. The pool was just written, so it is read from memory
where it fits there.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from configs.data import TokensDataConfig
from trainer.data.build import build_source
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource

SHARDS = 10
VOCAB_SIZE = 50_000
MEDIAN_DOCUMENT = 600


def write_pool(folder: Path, tokens: int) -> None:
    """Shards in datatrove's format; every document ends with id 0."""
    generator = np.random.default_rng(0)
    for number in range(SHARDS):
        count = tokens // SHARDS
        path = folder / f"{number:05d}.ds"
        lengths = np.exp(generator.normal(np.log(MEDIAN_DOCUMENT), 1.2, count // 100)).astype(np.int64) + 1
        ends = np.cumsum(lengths)
        ends = np.append(ends[ends < count], count)
        ids = generator.integers(1, VOCAB_SIZE, count, dtype="<u2")
        ids[ends - 1] = 0
        ids.tofile(path)
        ends.astype("<u8").tofile(f"{path}.index")
        Path(f"{path}.metadata").write_text(f"random|2\n{count}\n")


def measure(
    source: RowSource,
    *,
    workers: int,
    batch_size: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Rows per second of a clock over at least `seconds`, after one step to start with."""
    loader = RowLoader(
        source,
        batch_size=batch_size,
        micro_batch_size=4,
        dp_rank=0,
        dp_size=1,
        num_workers=workers,
        pin_memory=False,
    )
    loader.step(0)
    start, step = clock(), 0
    while (spent := clock() - start) < seconds:
        step += 1
        loader.step(step)
    loader.close()
    return step * batch_size / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--model-tokens-per-second", type=float, default=52_802)
    parser.add_argument("--folder", type=Path, help="where the pool is written for the time being")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write_pool(Path(folder), args.tokens)
        config = TokensDataConfig(type="tokens", paths=[Path(folder)], seq_len=args.seq_len)
        start = time.perf_counter()
        source = build_source(config, vocab_size=VOCAB_SIZE, eos_token_id=0, tokenizer_name="random")
        opening = time.perf_counter() - start
        options = {"batch_size": args.batch_size, "seconds": args.seconds}
        rates = {workers: measure(source, workers=workers, **options) for workers in args.workers}

    eaten = args.model_tokens_per_second / args.seq_len
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pool_tokens": args.tokens,
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "seconds_to_open": round(opening, 4),
        "rows_per_second": {str(workers): round(rate, 1) for workers, rate in rates.items()},
        "model_rows_per_second": round(eaten, 2),
        "times_the_model": {str(workers): round(rate / eaten, 1) for workers, rate in rates.items()},
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
