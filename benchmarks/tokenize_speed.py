"""Speed of `tokenize` beside datatrove's own pipeline on the same files, tokenizer, tasks and workers.

    uv run python benchmarks/tokenize_speed.py --out benchmarks/results/tokenize_cpu.json

Text is Python's standard library, as one jsonl file per task. Both sides run as programs of their own, in turns:
`tokenize`, and datatrove's LocalPipelineExecutor with JsonlReader and DocumentTokenizer. Times are those of the whole
program, imports included, and the best of the rounds counts. CPU seconds hardly depend on what else the machine does;
with one worker only, because those of datatrove's worker processes cannot be seen from here.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

TOKENIZER = Path(__file__).parents[1] / "examples" / "quickstart" / "tokenizer"

OURS = "import sys; from trainer.tokenize.command import main; main()"
THEIRS = """
import sys
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    text, out, tokenizer, tasks, workers = sys.argv[1:]
    pipeline = [
        JsonlReader(text),
        DocumentTokenizer(out + "/train", tokenizer + "/tokenizer.json", eos_token="<|endoftext|>", seed=0),
    ]
    LocalPipelineExecutor(pipeline, tasks=int(tasks), workers=int(workers), logging_dir=out + "/logs").run()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60, help="of text; the library is repeated as needed")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        num_bytes = write_corpus(root / "text", args.megabytes * 10**6, args.tasks)
        program = root / "theirs.py"
        program.write_text(THEIRS)
        runs = []
        for workers in args.workers:
            seconds: dict[str, list[float]] = {"tokenize": [], "datatrove": []}
            cpu_seconds: dict[str, list[float]] = {"tokenize": [], "datatrove": []}
            for number in range(args.rounds):
                for name in seconds:
                    out = root / f"{name}-{workers}-{number}"
                    wall, cpu = run(command(name, root / "text", out, program, args.tasks, workers))
                    seconds[name].append(round(wall, 2))
                    cpu_seconds[name].append(round(cpu, 2))
                tokens = [count_tokens(root / f"{name}-{workers}-{number}") for name in seconds]
                if tokens[0] != tokens[1]:
                    raise SystemExit(f"the two sides wrote {tokens[0]} and {tokens[1]} tokens")
            best = {name: min(times) for name, times in seconds.items()}
            best_cpu = {name: min(times) for name, times in cpu_seconds.items()}
            runs.append(
                {
                    "workers": workers,
                    "tokens": tokens[0],
                    "seconds": seconds,
                    "tokens_per_second": {name: round(tokens[0] / value) for name, value in best.items()},
                    "speed_relative_to_datatrove": round(best["datatrove"] / best["tokenize"], 3),
                }
            )
            if workers == 1:
                ratio = round(best_cpu["datatrove"] / best_cpu["tokenize"], 3)
                runs[-1] |= {"cpu_seconds": cpu_seconds, "cpu_speed_relative_to_datatrove": ratio}
            print(json.dumps(runs[-1]), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("datatrove", "tokenizers", "transformers")},
        "text_bytes": num_bytes,
        "tasks": args.tasks,
        "runs": runs,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def write_corpus(folder: Path, num_bytes: int, num_files: int) -> int:
    """At least `num_bytes` of text in equal files; gives the bytes written."""
    folder.mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [text for path in sources if "site-packages" not in path.parts if (text := read(path))]
    written = 0
    files = [(folder / f"{number:03d}.jsonl").open("w") for number in range(num_files)]
    number = 0
    while written < num_bytes:
        text = texts[number % len(texts)]
        files[number % num_files].write(json.dumps({"id": str(number), "text": text}) + "\n")
        written += len(text.encode())
        number += 1
    for file in files:
        file.close()
    return written


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def command(name: str, text: Path, out: Path, program: Path, tasks: int, workers: int) -> list[str]:
    if name == "datatrove":
        return [sys.executable, str(program), str(text), str(out), str(TOKENIZER), str(tasks), str(workers)]
    flags = {
        "output-dir": out,
        "tokenizer.name": TOKENIZER,
        "heldout.fraction": 0.01,
        "num-tasks": tasks,
        "num-workers": workers,
    }
    return [sys.executable, "-c", OURS, str(text), *(f"--{key}={value}" for key, value in flags.items())]


def run(arguments: list[str]) -> tuple[float, float]:
    """Seconds of a program from its start to its end, and CPU seconds of its processes."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def count_tokens(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.ds")) // 2


if __name__ == "__main__":
    main()
