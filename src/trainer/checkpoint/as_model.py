"""A checkpoint of ours in the place of a Hugging Face folder: `model.name` may be one."""

from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from configs.errors import ConfigError
from trainer.checkpoint.export import MODEL_PREFIX
from trainer.checkpoint.folder import FOLDER_NAME, list_steps, step_path
from trainer.checkpoint.manifest import STATE_NAME, read_checkpoint, read_manifest
from trainer.checkpoint.model_record import ModelRecord
from trainer.checkpoint.safe_reader import DamagedError
from trainer.checkpoint.tensor_reader import TensorReader
from trainer.errors import RunError
from trainer.weights.folder import StoredTensor, WeightFiles, open_weights
from trainer.weights.write import DTYPE_NAMES


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, and no Hugging Face model."""
    return (folder / STATE_NAME).is_file() and not (folder / "config.json").exists()


def refuse_run(folder: Path) -> None:
    """
    Raises:
        ConfigError: the folder is that of a run or of its checkpoints, of which one has to be named.
    """
    inner = folder if folder.name == FOLDER_NAME else folder / FOLDER_NAME
    steps = list_steps(inner)
    if steps and not (folder / "config.json").exists():
        newest = step_path(inner, steps[-1])
        raise ConfigError.one("model.name", f"{folder} holds {len(steps)} checkpoints: name one, such as {newest}")


def model_of(checkpoint: Path) -> ModelRecord:
    """What a checkpoint says about its model.

    Raises:
        ConfigError: it is damaged, or holds adapters only.
    """
    try:
        record = ModelRecord.of(read_manifest(checkpoint)["state"])
    except (DamagedError, RunError) as error:
        raise _fault(checkpoint, error) from error
    if record.adapters is not None:
        raise ConfigError.one(
            "model.name",
            f"{checkpoint} holds adapters only: merge them with export-hf and give the folder that it writes",
        )
    return record


def open_model(folder: Path) -> WeightFiles:
    """The weights of a checkpoint or of a Hugging Face folder, known from their headers.

    Raises:
        ConfigError: they are missing or damaged.
    """
    if not is_checkpoint(folder):
        return open_weights(folder)
    try:
        _, metadata = read_checkpoint(folder)
    except DamagedError as error:
        raise _fault(folder, error) from error
    reader = TensorReader(folder, metadata)
    tensors = {
        name.removeprefix(MODEL_PREFIX): StoredTensor(
            file=folder, dtype=DTYPE_NAMES.get(reader.dtype(name), str(reader.dtype(name))), shape=reader.shape(name)
        )
        for name in reader.names
        if name.startswith(MODEL_PREFIX)
    }

    def read(name: str, start: int, stop: int) -> Tensor:
        return reader.read_rows(MODEL_PREFIX + name, start, stop)

    return WeightFiles(folder=folder, tensors=tensors, open_rows=lambda: nullcontext(read))


def _fault(checkpoint: Path, error: Exception) -> ConfigError:
    return ConfigError.one("model.name", f"checkpoint {checkpoint} cannot be loaded: {error}")
