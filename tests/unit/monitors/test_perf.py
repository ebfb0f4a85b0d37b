"""Peaks by GPU name, utilisation, memory."""

from pathlib import Path

import pytest
import torch

from trainer.perf import mfu, peak_flops, peak_flops_of, peak_memory_bytes

STATUS = Path("/proc/self/status")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_peak_of_known_gpus(name: str, peak: float) -> None:
    assert peak_flops_of(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Tesla T4",
        "NVIDIA L400",
        "NVIDIA A1000",
        "",
    ],
)
def test_no_peak_is_guessed(name: str) -> None:
    """A wrong peak is worse than none: a slice, a laptop chip or a longer number is another device."""
    assert peak_flops_of(name) is None


def test_no_peak_on_cpu() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_mfu_is_the_percentage_of_all_devices_peak() -> None:
    assert mfu(flops=4e12, seconds=2.0, world_size=4, peak=2e12) == 25.0


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's own count is in /proc on Linux only")
def test_peak_memory_on_cpu_is_that_of_the_process() -> None:
    most = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(int(most.split()[1]) * 1024, rel=0.05)
