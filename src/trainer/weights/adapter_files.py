"""Adapters as files of peft: `adapter_model.safetensors` and `adapter_config.json`."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from models.lora import is_adapter
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.weights.write import TensorEntry, write_safetensors

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Beginning of the names in peft's files, before those of the base model."""


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """What has to be known of adapters, as the state of a checkpoint keeps it. Fields as those of `[model.lora]`."""

    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    modules_to_save: list[str]

    base: str | None
    """Folder or Hugging Face id of the weights that they belong to, None where these had no meaning."""

    fingerprint: str | None
    """Of the base's weights: see trainer.weights.fingerprint."""

    @property
    def known_base(self) -> str:
        """The base's name.

        Raises:
            RunError: there was none.
        """
        if self.base is None:
            raise RunError("its adapters were trained beside weights without meaning (model.debug.random_init)")
        return self.base

    @classmethod
    def of(cls, values: Any) -> "AdapterRecord":
        """From JSON values.

        Raises:
            RunError: they do not have this form.
        """
        if isinstance(values, dict) and set(values) == {field.name for field in fields(cls)}:
            record = cls(**values)
            lists = (record.target_modules, record.modules_to_save)
            is_text = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
            numbers = (record.rank, record.alpha, record.dropout)
            is_number = all(isinstance(number, int | float) for number in numbers) and isinstance(record.rank, int)
            texts = (record.base, record.fingerprint)
            if is_text and is_number and record.rank >= 1 and all(isinstance(text, str | None) for text in texts):
                return record
        raise RunError("state.json describes its adapters in an unknown form")


def write_adapters(
    folder: Path,
    record: AdapterRecord,
    entries: Sequence[TensorEntry],
    read: Callable[[str], Tensor],
    *,
    on_progress: Callable[[int], None],
) -> None:
    """Write both files and wait until they are on disk.

    Args:
        folder: exists.
        record: says what they are.
        entries: adapters and what is trained whole beside them, by canonical name.
        read: as in `write_safetensors`.
        on_progress: likewise.

    Raises:
        OSError: they cannot be written.
        RunError: the adapters have no base.
    """
    config = _config(record, [entry.name.rpartition(".")[0] for entry in entries if not is_adapter(entry.name)])
    write_safetensors(
        folder,
        [replace(entry, name=_PREFIX + entry.name) for entry in entries],
        lambda name: read(name.removeprefix(_PREFIX)),
        max_shard_bytes=sys.maxsize,  # peft looks for one file
        on_progress=on_progress,
        single_file=WEIGHTS_NAME,
    )
    write_whole(folder / CONFIG_NAME, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _config(record: AdapterRecord, whole: list[str]) -> dict[str, Any]:
    """peft's own description of the adapters.

    Args:
        whole: full names of the modules that are trained whole, more than once too: peft finds them by the end of
            their names, in the middle of a word too.
    """
    from peft import LoraConfig

    alpha: Any = int(record.alpha) if record.alpha == int(record.alpha) else record.alpha
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=record.known_base,
        r=record.rank,
        lora_alpha=alpha,
        lora_dropout=record.dropout,
        target_modules=record.target_modules,
        modules_to_save=list(dict.fromkeys(whole)) or None,
        inference_mode=True,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
