"""Held-out likelihood on the live weights; see docs/validation.md."""

from trainer.validation.build import build_validation
from trainer.validation.scoring import Validation

__all__ = ["Validation", "build_validation"]
