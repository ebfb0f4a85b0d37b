"""What every config table shares: strict keys, field docs, `"None"` for null (TOML has none), faults with keys."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from configs.errors import Fault

TABLE_FAULTS = "table_faults"
"""Type of the pydantic error that carries the faults of one table in its context."""

_PLAIN_NAME = r"^\w[\w.-]*$"

PlainName = Annotated[str, Field(pattern=_PLAIN_NAME)]
"""A name in the metrics, or of a folder: never a path."""

PATTERNS = {_PLAIN_NAME: 'letters, digits and "_", after the first one also "." and "-"'}
"""What the patterns of fields allow, in words."""


class BaseConfig(BaseModel):
    """A table of the config. Frozen: a config is built once and never changed afterwards."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        # model.arch may hold infinity; as null it would not read back as the same config.
        ser_json_inf_nan="constants",
    )

    positional: ClassVar[str | None] = None
    """Field of a root that arguments without a flag go to: `compare-runs A B` is `compare-runs --runs A B`."""

    def table_faults(self) -> list[Fault]:
        """What is wrong between the fields of this table; keys relative to it. Holds however a config is built."""
        return []

    def run_faults(self) -> list[Fault]:
        """What is wrong between the tables below this one, or on disk, when a run is about to start; full keys.

        Only the root is asked, once all tables are sound.
        """
        return []

    @model_validator(mode="before")
    @classmethod
    def _none_from_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: None if value == "None" else value for key, value in values.items()}

    @model_validator(mode="after")
    def _no_table_faults(self) -> Self:
        faults = self.table_faults()
        if faults:
            text = "; ".join(f"{fault.key}: {fault.message}" for fault in faults)
            raise PydanticCustomError(TABLE_FAULTS, "{text}", {"text": text, "faults": faults})
        return self
