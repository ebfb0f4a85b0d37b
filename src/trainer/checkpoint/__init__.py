"""Checkpoints: written in the background, committed by one rename, read without running code; see docs/checkpoints.md.

Tensors lie in torch.distributed.checkpoint's format, everything else in `state.json` beside them.
"""

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.fits import check_fits
from trainer.checkpoint.folder import find_checkpoint, find_newest
from trainer.checkpoint.manifest import read_state
from trainer.checkpoint.model_record import ModelRecord
from trainer.checkpoint.resume import Place, find_first, skips_of
from trainer.checkpoint.tensor_writer import checkpoint_size

__all__ = [
    "Checkpointer",
    "ModelRecord",
    "Place",
    "check_fits",
    "checkpoint_size",
    "find_checkpoint",
    "find_first",
    "find_newest",
    "read_state",
    "skips_of",
]
