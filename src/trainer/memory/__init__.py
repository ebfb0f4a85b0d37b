"""What a rank needs of its GPU's memory, estimated before anything runs."""

from trainer.memory.estimate import MemoryEstimate, RankShape, estimate_memory

__all__ = ["MemoryEstimate", "RankShape", "estimate_memory"]
