"""What a checkpoint says about its model, so that it can be exported without the config of the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainer.errors import RunError
from trainer.weights.adapter_files import AdapterRecord

_NOT_COMPUTED = ("dtype", "architectures", "use_cache")
"""Keys of a Hugging Face config that change nothing in training."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """The value of `model` in the state of a checkpoint."""

    config: dict[str, Any]
    """Its Hugging Face config as JSON values, `model_type` included."""

    tokenizer: str | None
    """Name of the run's tokenizer, None when it had none."""

    compute_dtype: str
    """"bfloat16", "float16", "float32" or "float64": that of the forward pass."""

    adapters: AdapterRecord | None = None
    """The checkpoint holds adapters, and modules trained whole beside them, not a whole model."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "ModelRecord":
        """From the state of a checkpoint.

        Raises:
            RunError: it does not say.
        """
        values = state.get("model")
        # Checkpoints from before there were adapters do not say that they have none.
        values = {"adapters": None, **values} if isinstance(values, dict) else {}
        if set(values) != {field.name for field in fields(cls)}:
            raise RunError("state.json does not say which model it is of: written by another version, or by a test")
        adapters = values.pop("adapters")
        record = cls(**values, adapters=None if adapters is None else AdapterRecord.of(adapters))
        known = isinstance(record.config, dict) and isinstance(record.config.get("model_type"), str)
        if not known or not isinstance(record.tokenizer, str | None):
            raise RunError("state.json describes its model in an unknown form")
        return record

    def to_json(self) -> dict[str, Any]:
        """For the state of a checkpoint."""
        return asdict(self)

    def changes(self, other: "ModelRecord") -> dict[str, tuple[Any, Any]]:
        """What `other` computes otherwise: values here and there by key, of the keys that both have (those of another
        version of transformers are of no use), and the dtype of the forward pass."""
        found = {
            key: (value, other.config[key])
            for key, value in self.config.items()
            if key in other.config and key not in _NOT_COMPUTED and value != other.config[key]
        }
        if self.compute_dtype != other.compute_dtype:
            found["compute_dtype"] = (self.compute_dtype, other.compute_dtype)
        return found

    @property
    def export_dtype(self) -> str:
        """Dtype of exported weights unless another is asked for: that of the forward pass; fp32 for fp64 runs, since
        no user of an export computes in fp64."""
        return "float32" if self.compute_dtype == "float64" else self.compute_dtype
