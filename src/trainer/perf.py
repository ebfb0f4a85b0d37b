"""How well the device is used: peak speed by GPU name, model FLOPs utilisation, peak memory."""

import re
import resource
import sys

import torch

_PEAKS: tuple[tuple[str, float], ...] = (
    ("A10", 125e12),
    ("A10G", 70e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L4", 121e12),
    ("L40", 181e12),
    ("L40S", 362e12),
    ("H20", 148e12),
    ("H100", 989.5e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("H800", 989.5e12),
    ("H800 PCIe", 756e12),
    ("H200", 989.5e12),
    ("H200 NVL", 835.5e12),
    ("GH200", 989.5e12),
    ("B100", 1750e12),
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("GB300", 2500e12),
    ("RTX 3090", 71e12),
    ("RTX 4090", 165e12),
    ("RTX 5090", 209.5e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)
"""Dense bf16 matrix FLOP/s with fp32 accumulation, from the vendors' data sheets (half of the "with sparsity" number).
A name matches when all its words are among the device's; of several the longest counts."""

_OTHER_CHIPS = frozenset({"Laptop", "Max", "MIG", "D"})
"""Words after which a name above means a slower device whose peak is not in the table."""


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of `device`; None on CPU and for GPUs that are not in the table."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Peak dense bf16 FLOP/s by the name that the driver gives a GPU ("NVIDIA H100 80GB HBM3"); None if unknown."""
    words = set(re.split(r"[\s-]+", name))
    if words & _OTHER_CHIPS:
        return None
    matches = [(len(known), peak) for known, peak in _PEAKS if words.issuperset(known.split())]
    return max(matches)[1] if matches else None


def mfu(flops: float, seconds: float, world_size: int, peak: float) -> float:
    """Model FLOPs utilisation in percent.

    Args:
        flops: matrix FLOPs of the step over all ranks.
        seconds: duration of the step.
        world_size: devices that shared it.
        peak: FLOP/s of one device.
    """
    return 100 * flops / (seconds * world_size * peak)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: tensors on a GPU, the whole process on a CPU.

    A count that the host keeps, so reading it does not wait for the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage gives bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
