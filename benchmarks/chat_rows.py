"""Speed of the rows of chats: rows per second that one process packs from tokenised conversations.

    uv run python benchmarks/chat_rows.py --out benchmarks/results/chat_rows.json

Writes conversations with the lengths of real ones (chat_lengths.py, about 500 tokens each) to a temporary folder,
tokenises them into the cache with a small vocabulary trained on them, and reads shuffled rows through the loader of
training, as rows.py does for token shards. Compared with what a model eats (--model-tokens-per-second: the 1b shape on
an H200, see README.md).
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from chat_lengths import conversations
from rows import measure

from configs.data import SFTDataConfig
from configs.renderer import RendererConfig
from trainer.data.chat.build import ChatTools, build_chats
from trainer.data.row import untracked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 8000
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of these texts, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=20_000)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--packing", nargs="+", default=["best_fit", "sequential"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--model-tokens-per-second", type=float, default=52_802)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()

    rates: dict[str, dict[str, float]] = {}
    data = ""
    with tempfile.TemporaryDirectory() as folder:
        rows = conversations(args.chats)
        path = Path(folder) / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = train_tokenizer([message["content"] for row in rows[:500] for message in row["messages"]])
        tools = ChatTools(
            tokenizer=tokenizer, renderer=RendererConfig(), cache_dir=Path(folder) / "cache", track=untracked
        )
        for packing in args.packing:
            config = SFTDataConfig(name=str(path), packing=packing, seq_len=args.seq_len)
            build_chats(config, tools, vocab_size=VOCAB_SIZE)  # tokenises once
            start = time.perf_counter()
            source = build_chats(config, tools, vocab_size=VOCAB_SIZE)
            rates[packing] = {"seconds_to_open": round(time.perf_counter() - start, 3)}
            data = source.description
            options = {"batch_size": args.batch_size, "seconds": args.seconds}
            # What one core gives, however busy the machine is.
            rate = measure(source, workers=0, clock=time.process_time, **options)
            rates[packing]["rows_per_cpu_second"] = round(rate, 1)
            for workers in args.workers:
                rate = measure(source, workers=workers, **options)
                rates[packing][f"rows_per_second_{workers}_workers"] = round(rate, 1)

    eaten = args.model_tokens_per_second / args.seq_len
    slowest = min(rate for measured in rates.values() for name, rate in measured.items() if name.startswith("rows"))
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "data": data.partition(";")[0],
        "packings": rates,
        "model_rows_per_second": round(eaten, 2),
        "times_the_model": round(slowest / eaten, 1),
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
