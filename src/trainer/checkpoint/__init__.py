"""Checkpoints: written in the background, committed by one rename, read without running code; see docs/checkpoints.md.

Tensors lie in torch.distributed.checkpoint's format, everything else in `state.json` beside them.
"""

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.fits import check_fits
from trainer.checkpoint.folder import find_checkpoint
from trainer.checkpoint.manifest import read_state
from trainer.checkpoint.model_record import ModelRecord
from trainer.checkpoint.tensor_writer import checkpoint_size

__all__ = [
    "Checkpointer",
    "ModelRecord",
    "check_fits",
    "checkpoint_size",
    "find_checkpoint",
    "read_state",
]
