"""Speed of training through the real command: tokens/s, MFU, peak memory of one shape on random token ids.

    benchmarks/gpu.sh python benchmarks/throughput.py --shape 1b --rows 4 --seq-len 8192

Runs `sft` with `data.type = "fake"`, takes the median of the steps after warm-up from metrics.jsonl, prints one JSON
line and, with --out, writes it to a file. `--documents` packs documents of random lengths instead of full rows.
Extra arguments go to `sft` as they are.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072}


def shape(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, *, tied: bool) -> dict:
    return LLAMA | {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": shape(64, 2, 4, 2, 128, 512, tied=True),
    "125m": shape(768, 12, 12, 12, 2048, 49152, tied=True),
    "1b": shape(2048, 16, 32, 8, 8192, 128256, tied=True),
    "3b": shape(3072, 28, 24, 8, 8192, 128256, tied=True),
    "8b": shape(4096, 32, 32, 8, 14336, 128256, tied=False),
}

COMMAND = [sys.executable, "-c", "import sys; from trainer.sft import main; sys.exit(main())"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=4, help="rows per rank (or ranks that share rows) and micro-batch")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model.cp", dest="cp", type=int, default=1, help="ranks that share each row")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--documents", action="store_true", help="packed documents of random lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args, extra = parser.parse_known_args()

    batch_size = args.rows * args.accum * args.gpus // args.cp
    arguments = [
        *("--model.arch", json.dumps(SHAPES[args.shape]), "--model.init"),
        *("--data.type", "fake", "--data.input-ids", "random", "--data.seq-len", str(args.seq_len)),
        *("--data.length", "variable" if args.documents else "fixed"),
        *("--data.micro-batch-size", str(args.rows), "--data.batch-size", str(batch_size)),
        *("--model.cp", str(args.cp)),
        *("--max-steps", str(args.steps), "--deployment.num-train-gpus", str(args.gpus), "--run.name", "throughput"),
        *([] if args.eager else ["--model.compile"]),
        *extra,
    ]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*COMMAND, *arguments, "--output-dir", folder], check=True)
        lines = (Path(folder) / "throughput" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][args.warmup :]

    def median(name: str) -> float | None:
        values = [step[name] for step in steps if name in step]
        return round(statistics.median(values), 4) if values else None

    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gpus": args.gpus,
        "torch": torch.__version__,
        "shape": args.shape,
        "rows": args.rows,
        "cp": args.cp,
        "accum": args.accum,
        "seq_len": args.seq_len,
        "documents": args.documents,
        "compiled": not args.eager,
        "extra": extra,
        "steps": len(steps),
        "tokens_per_second_per_gpu": median("perf/throughput_per_gpu"),
        "seconds_per_step": median("time/step"),
        "mfu": median("perf/mfu"),
        "mfu_6dn": median("perf/mfu_6dn"),
        "peak_memory_gib": median("perf/peak_memory"),
        "data_wait_seconds_max": median("time/data/max"),
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
