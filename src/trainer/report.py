"""From a step's statistics to its metrics: what is collected, when it is read, and the names of docs/metrics.md."""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from models.base import CausalLM
from trainer.data.digest import format_digest
from trainer.data.loader import StepBatches
from trainer.errors import RunError
from trainer.metrics import DeviceClock, Mark, MetricsAccumulator, PendingMetrics
from trainer.micro_batch import StepResult
from trainer.optim.gradients import GradientNorms
from trainer.parallel.checksum import checksum_sums, read_checksum
from trainer.parallel.mesh import Mesh
from trainer.perf import mfu, peak_flops, peak_memory_bytes
from trainer.state import TrainState
from trainer.stragglers import RankTimes, add_times, read_times

Verdict = Literal["go on", "rewind", "stop"]
Metrics = dict[str, float | int | str]


def parameter_counts(model: CausalLM) -> Metrics:
    """The counts of docs/metrics.md."""
    return {f"params/{name}": count for name, count in asdict(model.count_parameters()).items()}


@dataclass(frozen=True, kw_only=True)
class StepMarks:
    """Moments of a step on the device."""

    start: Mark
    """End of the step before, or of the checkpoint or validation between."""

    forward: Mark
    """Begin of the first forward pass."""

    backward: Mark
    """End of the last backward pass."""

    update: Mark
    """Begin of the optimizer's update, after the last collective of the step but that of its statistics."""

    end: Mark


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step's metrics as read, and what they ask for. Equal on every rank."""

    step: int
    metrics: Metrics
    verdict: Verdict
    stop_requested: bool


@dataclass(frozen=True, kw_only=True)
class _Pending:
    step: int
    reduced: PendingMetrics
    marks: StepMarks
    lr: float
    epoch: float
    num_samples: int


class StepReporter:
    """Collects the statistics of each step and hands out its report one step later."""

    def __init__(self, model: CausalLM, state: TrainState, mesh: Mesh, *, checksum_interval: int | None) -> None:
        """
        Args:
            checksum_interval: every so many steps the parameters' checksum is reported too.
        """
        # FLOPs are linear in both, and counting parameters takes over a millisecond: once, not in every step.
        self._flops_per_token = model.flops(num_tokens=1, attention_pairs=0)
        self._flops_per_pair = model.flops(num_tokens=0, attention_pairs=1)
        self._flops_6dn_per_token = model.flops_6dn(num_tokens=1)
        self._state = state
        self._mesh = mesh
        self._checksum_interval = checksum_interval
        self._peak_flops = peak_flops(mesh.device)
        self._pending: _Pending | None = None
        self._times: RankTimes | None = None
        self.clock = DeviceClock(mesh.device)

    def collect(
        self,
        step: int,
        *,
        batches: StepBatches,
        result: StepResult,
        norms: GradientNorms,
        marks: StepMarks,
        lr: float,
        epoch: float,
        stop_requested: bool,
    ) -> None:
        """Reduce the statistics of step `step` over ranks and start their way to the host. Does not wait."""
        # Of rows that ranks share, one of them counts what the host knows.
        micro_batches = batches.micro_batches if self._mesh.counts_rows else []
        digest = batches.digest if self._mesh.counts_rows else (0, 0)
        tokens = sum(batch.num_tokens for batch in micro_batches)
        padding = sum(batch.num_padding_tokens for batch in micro_batches)
        pairs = sum(batch.attention_pairs for batch in micro_batches)
        stats = MetricsAccumulator(self._mesh)
        stats.add_sum("nats", result.nats)
        stats.add_sum("num_tokens", tokens)
        stats.add_sum("num_padding_tokens", padding)
        stats.add_sum("attention_pairs", pairs)
        stats.add_sum("wait_seconds", batches.wait_seconds)
        stats.add_sum("digest_low", digest[0])
        stats.add_sum("digest_high", digest[1])
        if self._checksum_interval is not None and (step + 1) % self._checksum_interval == 0:
            for name, lane in checksum_sums(self._state.model_tensors(), self._mesh).items():
                stats.add_sum(name, lane)
        stats.add_max("wait_seconds_max", batches.wait_seconds)
        peak_memory = peak_memory_bytes(self._mesh.device)
        stats.add_max("peak_memory", peak_memory)
        stats.add_sum("peak_memory_sum", peak_memory)
        if self._times is not None:
            add_times(stats, self._times, self._mesh.rank)
        stats.add_max("stop", stop_requested)
        stats.add_replicated("loss_tokens", result.loss_tokens)
        stats.add_replicated("grad_norm", norms.total)
        stats.add_replicated("update_ok", norms.update_ok)
        for group, norm in norms.groups.items():
            stats.add_replicated(f"grad_norm/{group}", norm)
        num_samples = sum(batch.input_ids.shape[0] for batch in batches.micro_batches) * self._mesh.dp_size
        self._pending = _Pending(
            step=step, reduced=stats.reduce(), marks=marks, lr=lr, epoch=epoch, num_samples=num_samples
        )

    def read(self) -> StepReport | None:
        """The report of the last collected step, once; waits until the device has finished that step."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        values = pending.reduced.read()
        loss = values["nats"] / values["loss_tokens"] if values["loss_tokens"] else math.nan
        updated = bool(values["update_ok"])
        loss_finite = math.isfinite(loss) or not values["loss_tokens"]
        verdict = self._state.guard.observe(pending.step, updated=updated, loss_finite=loss_finite)
        self._count(pending, values)
        return StepReport(
            step=pending.step,
            metrics=self._metrics(pending, values, loss),
            verdict=verdict,
            stop_requested=bool(values["stop"]),
        )

    def _count(self, pending: _Pending, values: dict[str, float]) -> None:
        progress = self._state.progress
        progress.step = pending.step + 1
        progress.num_samples += pending.num_samples
        progress.num_tokens += int(values["num_tokens"])
        progress.num_loss_tokens += int(values["loss_tokens"])
        progress.num_padding_tokens += int(values["num_padding_tokens"])

    def _metrics(self, pending: _Pending, values: dict[str, float], loss: float) -> Metrics:
        state, marks, world_size = self._state, pending.marks, self._mesh.world_size
        seconds = self.clock.seconds(marks.start, marks.end)
        self._times = RankTimes(step=seconds, update=self.clock.seconds(marks.update, marks.end))
        real_tokens = values["num_tokens"] - values["num_padding_tokens"]
        metrics: Metrics = {
            "loss/mean": loss,
            "loss/perplexity": math.exp(min(loss, 700.0)),
            "loss/nan_count": state.guard.nan_count,
            "loss/spike": state.loss_spike.observe(loss),
            "optim/lr": pending.lr,
            "optim/grad_norm": values["grad_norm"],
            "optim/grad_norm_spike": state.grad_norm_spike.observe(values["grad_norm"]),
            "optim/skipped_steps": state.guard.skipped_steps,
            "perf/throughput": real_tokens / seconds,
            "perf/throughput_per_gpu": real_tokens / seconds / world_size,
            "perf/peak_memory": values["peak_memory"] / 2**30,
            "perf/peak_memory/max": values["peak_memory"] / 2**30,
            "perf/peak_memory/mean": values["peak_memory_sum"] / world_size / 2**30,
            "progress/epoch": pending.epoch,
            "progress/num_samples": state.progress.num_samples,
            "progress/num_tokens": state.progress.num_tokens,
            "progress/num_loss_tokens": state.progress.num_loss_tokens,
            "progress/num_padding_tokens": state.progress.num_padding_tokens,
            "time/step": seconds,
            "time/forward_backward": self.clock.seconds(marks.forward, marks.backward),
            "time/data/max": values["wait_seconds_max"],
            "time/data/mean": values["wait_seconds"] / world_size,
            **read_times(values, world_size),
            "digest/rows": format_digest((int(values["digest_low"]), int(values["digest_high"]))),
        }
        if "checksum_low" in values:
            lanes = read_checksum(values, self._mesh)
            if lanes is None:
                raise RunError(
                    f"the replicas' weights differ after step {pending.step + 1}: memory, a link or a kernel of some "
                    "GPU is not to be trusted; go on from an earlier checkpoint, without that machine"
                )
            metrics["digest/params"] = format_digest(lanes)
        if self._peak_flops is not None:
            flops = self._flops_per_token * real_tokens + self._flops_per_pair * values["attention_pairs"]
            metrics["perf/mfu"] = mfu(flops, seconds, world_size, self._peak_flops)
            metrics["perf/mfu_6dn"] = mfu(
                self._flops_6dn_per_token * real_tokens, seconds, world_size, self._peak_flops
            )
        for name, value in values.items():
            if name.startswith("grad_norm/"):
                metrics[f"optim/{name}"] = value
        return metrics
