"""What went wrong in a worker, where libraries say it in a way that does not help."""

import re

from trainer.heartbeat import Beat

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_SIZES = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_OF_COLLECTIVES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

_LESS_GPU_MEMORY = (
    'less takes: a smaller data.micro_batch_size (same result), model.ac = "full" (some slower), more GPUs; '
    "--dry-run estimates the need, docs/memory.md has the other levers"
)
_LESS_HOST_MEMORY = "less takes: a smaller data.micro_batch_size (same result), fewer processes on the machine"


def out_of_memory(error: BaseException, *, rank: str, doing: Beat | None) -> str | None:
    """What to say of a failed allocation, of the device or the host, in words; None if it is something else.

    Args:
        doing: what the rank was doing.
    """
    text = str(error)
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text)):
        return None
    on_gpu = "CUDA" in text or "HIP" in text or "GPU" in text
    facts = ["out of GPU memory" if on_gpu else "out of memory"]
    if doing is not None:
        facts[0] += f" ({doing})"
    if sizes := _SIZES.search(text):
        facts.append(f"{sizes[1]} more were asked for")
    if free := _FREE.search(text):
        facts.append(f"{free[2]} of {free[1]} were free")
    return f"rank {rank}: {', '.join(facts)}; {_LESS_GPU_MEMORY if on_gpu else _LESS_HOST_MEMORY}"


def is_timeout(error: BaseException) -> bool:
    """Whether a rank gave up waiting for others in a collective: the fault is not its own."""
    seen: BaseException | None = error
    while seen is not None:
        # gloo's errors are plain RuntimeErrors.
        of_gloo = type(seen) is RuntimeError and "gloo" in str(seen)
        if (of_gloo or type(seen).__name__ in _OF_COLLECTIVES) and _TIMED_OUT.search(str(seen)):
            return True
        seen = seen.__cause__
    return False
