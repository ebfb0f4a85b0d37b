"""`<run_dir>/weights`: with `ckpt.weights`, each checkpoint's weights as a Hugging Face folder beside it.

weights/
  step_200/        whole; goes together with checkpoints/step_200
  .step_300.tmp/   being written
  .step_100.gone/  being removed
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.export import plan_export, write_export
from trainer.checkpoint.folder import step_path
from trainer.checkpoint.model_record import ModelRecord
from trainer.files import remove_folder
from trainer.weights.tokenizer_files import TokenizerFiles, read_tokenizer

FOLDER_NAME = "weights"

_LEFTOVER_NAME = re.compile(r"\.step_[0-9]+\.(tmp|gone)")


class WeightsFolder:
    """Writes and removes the folders. On rank 0 only."""

    def __init__(self, run_dir: Path, record: ModelRecord) -> None:
        """Reads the tokenizer and clears what a killed run left.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        self._folder = run_dir / FOLDER_NAME
        # Now, since both take the interpreter lock for long: in the background of a step they would be felt.
        from transformers.models.auto import modeling_auto  # noqa: F401

        if record.adapters is not None:
            import peft  # noqa: F401

        self._tokenizer: TokenizerFiles | None = read_tokenizer(record.tokenizer) if record.tokenizer else None
        for path in list(self._folder.glob(".step_*")):
            if _LEFTOVER_NAME.fullmatch(path.name):
                shutil.rmtree(path)

    def has(self, step: int) -> bool:
        """The weights of `step` are there, whole."""
        return step_path(self._folder, step).is_dir()

    def write(self, checkpoint: Path, on_progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Export a committed checkpoint.

        Args:
            on_progress: told how many bytes are written, after each tensor.

        Raises:
            RunError: it cannot be written; the checkpoint is as it was.
        """
        export = plan_export(checkpoint, None)
        write_export(export, step_path(self._folder, export.step), self._tokenizer, on_progress=on_progress)


def discard_weights(run_dir: Path, step: int) -> None:
    """Remove the weights of `step`, if there are any. Killed at any moment, none that look whole are left damaged."""
    path = step_path(run_dir / FOLDER_NAME, step)
    if path.is_dir():
        remove_folder(path)


def weights_size(num_elements: int, dtype_bytes: int) -> int:
    """Bytes that an export of `num_elements` takes on disk, rounded up."""
    return num_elements * dtype_bytes + 2**26
