"""Checkpoints: written in the background, committed by one rename, read without running code; see docs/checkpoints.md.

Tensors lie in torch.distributed.checkpoint's format, everything else in `state.json` beside them.
"""

from trainer.checkpoint.checkpointer import Checkpointer, check_fits, checkpoint_size
from trainer.checkpoint.folder import find_checkpoint, read_state

__all__ = ["Checkpointer", "check_fits", "checkpoint_size", "find_checkpoint", "read_state"]
