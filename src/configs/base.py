"""What every config table shares: strict keys, field docs, and the `"None"` of TOML, which has no null."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class BaseConfig(BaseModel):
    """A table of the config. Frozen: a config is built once and never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _none_from_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: None if value == "None" else value for key, value in values.items()}
