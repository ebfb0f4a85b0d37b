"""Step times on 8 to 1,024 GPUs, simulated from what one GPU was measured to do; the tables of docs/scaling.md.

    python benchmarks/scaling.py            # print them
    python benchmarks/scaling.py --write    # put them into docs/scaling.md

Every file of throughput.py in results/ with more than one GPU is simulated from the one of the same training on one,
and stands beside its measurement in the first table. Rates of links come from h200_cluster.json.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from scaling_model import Cluster, Plan, Shape, Work, step_time
from throughput import SHAPES

from models.base import CausalLM
from models.registry import build_config, build_model

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "scaling.md"
GPUS = tuple(8 << power for power in range(8))
PARALLEL = ("--model.dp-replicate", "--model.cp-style")
DEFERRALS = ("--model.defer-grad-sync", "--model.defer-replicate-sync")


def load_cluster(ports_per_node: int = 8) -> Cluster:
    """The machines that h200_cluster.json describes."""
    values = json.loads((HERE / "h200_cluster.json").read_text())
    return Cluster(**{name: entry["value"] for name, entry in values.items()}, ports_per_node=ports_per_node)


@cache
def model_of(name: str) -> CausalLM:
    """A shape of throughput.py, without memory."""
    with torch.device("meta"):
        config = build_config(SHAPES[name], tokenizer_length=SHAPES[name]["vocab_size"], special_ids={})
        return build_model(config, seq_len=8192, attn="sdpa", dtype=torch.float32)


def sizes_of(name: str) -> Shape:
    """What the simulation needs of it."""
    model, arch = model_of(name), SHAPES[name]
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    return Shape(
        num_blocks=len(blocks),
        block_params=blocks[0],
        root_params=model.count_parameters().num_params - sum(blocks),
        heads=arch["num_attention_heads"],
        kv_heads=arch["num_key_value_heads"],
        head_dim=arch["hidden_size"] // arch["num_attention_heads"],
    )


def work_of(name: str, *, tokens: int, seconds: float, flops: float) -> Work:
    """A micro-batch that takes so long, of so many FLOPs."""
    shapes = model_of(name).matrix_shapes
    attention = flops - shapes.flops(tokens, 0)
    head = 6 * shapes.head_params * tokens
    return Work(
        shape=sizes_of(name),
        seconds=seconds,
        head_share=head / flops,
        attention_share=attention / flops,
        tokens=tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A result of throughput.py."""

    name: str
    values: Mapping[str, Any]

    @property
    def work(self) -> Work:
        """Of one GPU: its step, without the optimizer."""
        cluster, values = load_cluster(), self.values
        idle = replace(work_of(values["shape"], tokens=1, seconds=0.0, flops=1.0), head_share=0.0)
        optimizer = step_time(idle, Plan(gpus=1), cluster).total
        flops = values["mfu"] / 100 * cluster.flops_per_second * values["seconds_per_step"] / values["accum"]
        return work_of(
            values["shape"],
            tokens=values["rows"] * values["seq_len"],
            seconds=(values["seconds_per_step"] - optimizer) / values["accum"],
            flops=flops,
        )

    @property
    def plan(self) -> Plan:
        """How its ranks were arranged."""
        extra = list(self.values["extra"])
        options = {name: extra[extra.index(name) + 1] for name in PARALLEL if name in extra}
        style: Literal["ulysses", "ring"] = "ring" if options.get("--model.cp-style") == "ring" else "ulysses"
        return Plan(
            gpus=self.values["gpus"],
            replicas=int(options.get("--model.dp-replicate", 1)),
            cp=self.values.get("cp", 1),
            cp_style=style,
            micro_batches=self.values["accum"],
            defer_grad_sync=DEFERRALS[0] in extra,
            defer_replicate_sync=DEFERRALS[1] in extra,
        )

    @property
    def training(self) -> tuple:
        """What has to be the same on one GPU."""
        extra = list(self.values["extra"])
        for name in PARALLEL:
            if name in extra:
                del extra[extra.index(name) : extra.index(name) + 2]
        extra = [word for word in extra if word not in DEFERRALS]
        same = ("shape", "rows", "seq_len", "documents", "compiled", "device")
        return (*(self.values[name] for name in same), *extra)


def measurements() -> Iterator[tuple[Measured, Measured]]:
    """Each result of more than one GPU, and that of one GPU that it is simulated from."""
    found = []
    for path in sorted((HERE / "results").glob("*.json")):
        values = json.loads(path.read_text())
        if isinstance(values, dict) and {"gpus", "rows", "accum", "seconds_per_step", "extra"} <= values.keys():
            found.append(Measured(name=path.stem, values=values))
    bases = {result.training: result for result in found if result.values["gpus"] == 1}
    for result in found:
        if result.values["gpus"] > 1 and result.training in bases:
            yield result, bases[result.training]


def simulated_seconds(result: Measured, base: Measured) -> float:
    """Step time of a result, from the one of one GPU."""
    return step_time(base.work, result.plan, load_cluster()).total


def base_of(name: str) -> Measured:
    """A result by its name."""
    return Measured(name=name, values=json.loads((HERE / "results" / f"{name}.json").read_text()))


def scaled_work(name: str, *, rows: int, seq_len: int) -> Work:
    """A micro-batch of full rows of a shape, at the FLOP rate that 1b was measured with."""
    base, tokens = base_of("h200_1b_causal").work, rows * seq_len
    rate = model_of("1b").flops(base.tokens, 4 * 8192 * 8193 // 2) / base.seconds
    flops = model_of(name).flops(tokens, rows * seq_len * (seq_len + 1) // 2)
    return work_of(name, tokens=tokens, seconds=flops / rate, flops=flops)


def speed(work: Work, plan: Plan, cluster: Cluster) -> float:
    """Tokens per second and GPU."""
    return work.tokens * plan.micro_batches / plan.cp / step_time(work, plan, cluster).total


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def reproduced() -> str:
    rows = []
    for result, base in measurements():
        simulated, seconds = simulated_seconds(result, base), result.values["seconds_per_step"]
        words = [f"`{result.name}`", f"{base.values['seconds_per_step']:.4f}", f"{seconds:.4f}", f"{simulated:.4f}"]
        rows.append([*words, f"{100 * (simulated / seconds - 1):+.1f} %"])
    return table(["result", "one GPU, s", "measured, s", "simulated, s", "difference"], rows)


def predicted(work: Work, single: float) -> str:
    """Weak scaling: every GPU has as many tokens."""
    head = ["GPUs", "FSDP, 8 ports", "HSDP, 8 ports", "FSDP, 1 port", "HSDP, 1 port"]
    rows = []
    for gpus in GPUS:
        cells = []
        for ports in (8, 1):
            for replicas in (1, gpus // 8):
                found = speed(work, Plan(gpus=gpus, replicas=replicas), load_cluster(ports))
                cells.append(f"{found:,.0f} ({100 * found / single:.0f} %)")
        rows.append([f"{gpus:,}", *cells])
    return table(head, rows)


def predicted_1b() -> str:
    base = base_of("h200_1b_causal")
    return predicted(base.work, speed(base.work, Plan(gpus=1), load_cluster()))


def predicted_8b() -> str:
    work = scaled_work("8b", rows=1, seq_len=8192)
    return predicted(work, speed(work, Plan(gpus=1), load_cluster()))


def least_tokens(plan: Plan, cluster: Cluster, *, most_exposed: float = 0.05) -> int:
    """Tokens per GPU and micro-batch from which at most this part of a step waits for links; 1b, rows of 8,192."""
    base = base_of("h200_1b_causal").work

    def is_enough(tokens: int) -> bool:
        scale = tokens / base.tokens
        time = step_time(replace(base, tokens=tokens, seconds=base.seconds * scale), plan, cluster)
        return time.exposed <= most_exposed * time.total

    low, high = 0, 1
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def crossovers() -> str:
    head = ["GPUs", "FSDP, 8 ports", "HSDP, 8 ports", "FSDP, 1 port", "HSDP, 1 port"]
    rows = []
    for gpus in (2, *GPUS[::2], GPUS[-1]):
        plans = [Plan(gpus=gpus), Plan(gpus=gpus, replicas=max(1, gpus // 8))]
        found = [least_tokens(plan, load_cluster(ports)) for ports in (8, 1) for plan in plans]
        rows.append([f"{gpus:,}", *(f"{tokens:,.0f}" for tokens in found)])
    return table(head, rows)


def deferral() -> str:
    """Eight micro-batches, by their size."""
    base = base_of("h200_1b_causal").work
    rows = []
    for gpus, ports in ((2, 8), (8, 8), (64, 8), (64, 1)):
        replicas = max(1, gpus // 8)
        for tokens in (2048, 8192, 32768):
            work = replace(base, tokens=tokens, seconds=base.seconds * tokens / base.tokens)
            plan = Plan(gpus=gpus, micro_batches=8)
            hybrid = replace(plan, replicas=replicas)
            plans = [plan, replace(plan, defer_grad_sync=True)]
            if replicas > 1:
                plans += [hybrid, replace(hybrid, defer_replicate_sync=True), replace(hybrid, defer_grad_sync=True)]
            cells = [f"{speed(work, found, load_cluster(ports)):,.0f}" for found in plans]
            rows.append([str(gpus), str(ports), f"{tokens:,}", *cells, *["-"] * (5 - len(cells))])
    head = ["GPUs", "ports", "tokens", "FSDP", "and defer_grad_sync", "HSDP", "and defer_replicate_sync"]
    return table([*head, "HSDP and defer_grad_sync"], rows)


def shared_rows() -> str:
    """One row of 65,536 tokens over the GPUs of one node."""
    work, cluster = scaled_work("1b", rows=1, seq_len=65536), load_cluster()
    single = step_time(work, Plan(gpus=1), cluster).total
    rows = []
    for cp in (2, 4, 8):
        cells = []
        for style in ("ulysses", "ring"):
            found = step_time(work, Plan(gpus=cp, cp=cp, cp_style=style), cluster)
            cells += [f"{single / found.total:.2f}", f"{1000 * found.rows_shared:.1f}"]
        rows.append([str(cp), *cells])
    return table(["cp", "ulysses, times faster", "waits, ms", "ring, times faster", "waits, ms"], rows)


TABLES = {
    "reproduced": reproduced,
    "predicted 1b": predicted_1b,
    "predicted 8b": predicted_8b,
    "crossovers": crossovers,
    "deferral": deferral,
    "shared rows": shared_rows,
}


def filled(text: str) -> str:
    """The page with its tables made anew: each stands between a comment with its name and an empty line."""
    for name, make in TABLES.items():
        mark = f"<!-- made by benchmarks/scaling.py: {name} -->"
        if mark not in text:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}: {mark}")
        before, _, after = text.partition(f"{mark}\n")
        rest = re.sub(r"^([|].*\n)*", "", after, count=1)
        text = f"{before}{mark}\n{make()}\n{rest}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(filled(PAGE.read_text()))
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
