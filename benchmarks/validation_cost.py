"""What a round of validation costs: its time over that of the plain forward passes of the same tokens.

    benchmarks/gpu.sh python benchmarks/validation_cost.py --shape 1b --out benchmarks/results/h200_1b_validation.json
    uv run python benchmarks/validation_cost.py --shape tiny --eager --tokens 20000 --seq-lens 128 512

Makes a held-out set of each kind asked for (documents of 600 to 1,500 tokens and some ten times as long, cut out of the
quickstart's held-out text), and times whole rounds as `[val]` runs them (reading, packing, forward passes, results).
The forward passes that they are held against are those of the same model, compiled alike, over the same documents in
rows without padding, made and on the device beforehand, without the greedy choice. Rounds and plain passes take turns,
after a warm-up of both; medians. The last line is the ratio of each kind.
"""

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughput import SHAPES
from transformers import PreTrainedTokenizerBase

from configs.model import CompileConfig, InitConfig, ModelConfig
from configs.validation import SuiteConfig
from models.base import CausalLM
from models.batch import Batch
from models.registry import build_config
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.model_setup import build_parallel_model, set_first_weights
from trainer.parallel.mesh import Mesh, one_rank_mesh
from trainer.tokenizer import load_tokenizer
from trainer.validation import Validation, build_validation

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
KINDS = ("tokens", "text", "ctxcont")
WARM_UP_DOCUMENTS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=5_000_000, help="of the set of token shards")
    parser.add_argument("--text-tokens", type=int, help="of the sets of text; a fifth of --tokens")
    parser.add_argument("--lengths", type=int, nargs=2, default=(600, 1500), help="of documents: [from, to)")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--context", choices=("none", "prefix"), default="none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()

    tokenizer = load_tokenizer(str(QUICKSTART / "tokenizer"))
    mesh = one_rank_mesh(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    model, vocab_size = build_bench_model(args, tokenizer, mesh)
    text_tokens = args.text_tokens or args.tokens // 5
    kinds = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            # A continuation is scored in one window: longer documents would lose their context, or be left out.
            num_tokens = args.tokens if kind == "tokens" else text_tokens
            documents = make_documents(num_tokens, args.lengths, long=kind != "ctxcont")
            bench = Bench(args, kind, documents, Path(folder) / kind, tokenizer, vocab_size, mesh)
            kinds[kind] = bench.measure(model)
            print(json.dumps({kind: kinds[kind]}), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "shape": args.shape,
        "compiled": not args.eager,
        "seq_lens": args.seq_lens,
        "micro_batch_tokens": args.micro_batch_tokens,
        "context": args.context,
        "document_lengths": list(args.lengths),
        "rounds": args.rounds,
        "kinds": kinds,
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("ratio of a round to its forward passes:", {kind: figures["ratio"] for kind, figures in kinds.items()})


def build_bench_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> tuple[CausalLM, int]:
    """The model of a training run at one rank, with drawn weights; and its number of ids."""
    arch = SHAPES[args.shape]
    arch = arch | {"vocab_size": max(arch["vocab_size"], len(tokenizer))}
    config = ModelConfig(arch=arch, init=InitConfig(), compile=None if args.eager else CompileConfig())
    hf_config = build_config(arch, tokenizer_length=len(tokenizer), special_ids={"eos_token_id": 0})
    model, grad_sync = build_parallel_model(config, hf_config, seq_len=max(args.seq_lens), mesh=mesh)
    set_first_weights(config, model, grad_sync, mesh, folder=None)
    return model, arch["vocab_size"]


def make_documents(num_tokens: int, lengths: Sequence[int], *, long: bool) -> list[np.ndarray]:
    """Slices of the quickstart's held-out text as tokens, EOS (0) last; with `long`, every fiftieth of about ten times
    as many tokens."""
    (shard,) = (QUICKSTART / "heldout").glob("*.ds")
    text = np.fromfile(shard, "<u2")
    text = text[text != 0]
    generator = np.random.default_rng(0)
    documents = []
    left = num_tokens
    while left > 0:
        is_long = long and len(documents) % 50 == 49
        length = max(2, min(left, int(generator.integers(lengths[0], lengths[1])) * (10 if is_long else 1)))
        start = int(generator.integers(0, max(1, text.size - length)))
        documents.append(np.append(text[start : start + length - 1], 0))
        left -= documents[-1].size
    return documents


class Bench:
    """One kind of set: its rounds, and the plain passes over its tokens."""

    def __init__(
        self,
        args: argparse.Namespace,
        kind: str,
        documents: list[np.ndarray],
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        mesh: Mesh,
    ) -> None:
        self.args, self.mesh, self.tokenizer, self.vocab_size = args, mesh, tokenizer, vocab_size
        folder.mkdir()
        self.folder = folder
        if kind == "tokens":
            self.path, self.documents = folder / "set", documents
            write_shard(self.path, documents)
        else:
            self.path = folder / "set.jsonl"
            rows = [text_row(kind, str(tokenizer.decode(document[:-1]))) for document in documents]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            texts = ["".join(row.values()) for row in rows]
            self.documents = [np.array(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def measure(self, model: CausalLM) -> dict[str, Any]:
        """Seconds of a round and of the plain passes, and what they did."""
        self.validation(WARM_UP_DOCUMENTS).run(model)
        start = time.perf_counter()
        validation = self.validation(None)
        building = time.perf_counter() - start
        batches = [batch for seq_len in self.args.seq_lens for batch in self.plain_batches(seq_len)]
        forward(model, batches[:3] + batches[-3:])
        rounds, plain = [], []
        for _ in range(self.args.rounds):
            rounds.append(self.seconds(lambda: validation.run(model)))
            plain.append(self.seconds(lambda: forward(model, batches)))
        num_tokens = sum(document.size for document in self.documents)
        # The plain passes hold up to one micro-batch more than the set's tokens.
        surplus = sum(batch.num_tokens for batch in batches) / (num_tokens * len(self.args.seq_lens))
        plain = [seconds / surplus for seconds in plain]
        round_seconds, plain_seconds = statistics.median(rounds), statistics.median(plain)
        return {
            "tokens": num_tokens,
            "documents": len(self.documents),
            "seconds_to_build": round(building, 2),
            "plain_passes": len(batches),
            "notes": validation.notes,
            "round_seconds": [round(seconds, 3) for seconds in rounds],
            "forward_seconds": [round(seconds, 3) for seconds in plain],
            "tokens_per_second": round(num_tokens * len(self.args.seq_lens) / round_seconds),
            "ratio": round(round_seconds / plain_seconds, 4),
        }

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall time of `call`, until the device is idle again."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()

    def validation(self, max_documents: int | None) -> Validation:
        table = {"name": "set", "path": self.path, "max_documents": max_documents}
        suite = SuiteConfig.model_validate(
            {
                "sets": [table],
                "seq_lens": self.args.seq_lens,
                "micro_batch_tokens": self.args.micro_batch_tokens,
                "context": self.args.context,
            }
        )
        validation = build_validation(
            suite,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            mesh=self.mesh,
            pin_memory=self.mesh.device.type == "cuda",
            chats=None,
            cache_dir=self.folder / "cache",
        )
        assert validation is not None
        return validation

    def plain_batches(self, seq_len: int) -> Iterator[Batch]:
        """All tokens in rows without padding, on the device; the last rows are filled from the beginning again."""
        rows_per_pass = self.args.micro_batch_tokens // seq_len
        num_tokens = sum(document.size for document in self.documents)
        num_rows = -(-num_tokens // (rows_per_pass * seq_len)) * rows_per_pass
        stream = np.resize(np.concatenate(self.documents), num_rows * seq_len + 1)
        is_last = np.zeros(num_tokens, bool)
        is_last[np.cumsum([document.size for document in self.documents]) - 1] = True
        is_last = np.resize(is_last, num_rows * seq_len)
        is_last[seq_len - 1 :: seq_len] = True
        ends = np.flatnonzero(is_last) + 1
        lengths = np.diff(ends, prepend=0)
        rows_of = (ends - 1) // seq_len
        for first in range(0, num_rows, rows_per_pass):
            span = slice(first * seq_len, (first + rows_per_pass) * seq_len)
            rows = Rows.empty(rows_per_pass, seq_len)
            rows.input_ids[:] = stream[span].reshape(rows_per_pass, seq_len)
            rows.labels[:] = stream[span.start + 1 : span.stop + 1].reshape(rows_per_pass, seq_len)
            rows.segment_lengths[:] = [lengths[rows_of == first + row] for row in range(rows_per_pass)]
            yield collate(rows, full_rows=False, pin_memory=False).to(self.mesh.device)


@torch.no_grad()
def forward(model: CausalLM, batches: list[Batch]) -> None:
    """The plain passes, one after the other, without waiting."""
    model.eval()
    for batch in batches:
        model(batch)
    model.train()


def write_shard(folder: Path, documents: list[np.ndarray]) -> None:
    """One shard in datatrove's format."""
    folder.mkdir()
    path = folder / "00000.ds"
    stream = np.concatenate(documents).astype("<u2")
    stream.tofile(path)
    np.cumsum([document.size for document in documents]).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"quickstart|2\n{stream.size}\n")


def text_row(kind: str, text: str) -> dict[str, str]:
    """A row of a set of text; of a continuation set, the last quarter is scored."""
    if kind == "text":
        return {"text": text}
    border = 3 * len(text) // 4
    return {"context": text[:border], "continuation": text[border:]}


if __name__ == "__main__":
    main()
