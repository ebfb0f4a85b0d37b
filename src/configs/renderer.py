"""`[renderer]`: what the chat template is told besides messages and tools; see docs/chats.md."""

import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault


class RendererConfig(BaseConfig):
    """`[renderer]`. An option that the template does not read is refused."""

    template: Path | None = None
    """A file with a Jinja chat template, in place of the tokenizer's own."""

    enable_thinking: bool | None = None
    """Reasoning on or off, where the template knows it by this name (Qwen3, GLM-4.5, SmolLM3)."""

    thinking: bool | None = None
    """The same under the name that DeepSeek and Granite templates have for it."""

    preserve_thinking: bool | None = None
    """Keep the reasoning of earlier turns."""

    clear_thinking: bool | None = None
    """Leave out the reasoning of earlier turns."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much reasoning the system message asks for; a template knows some of these."""

    date: datetime.date | None = None
    """The day that templates with a date write. Needed for those: today's would change the tokens from day to day."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, by the names that it has for them."""

    def table_faults(self) -> list[Fault]:
        return [
            Fault(key=f"options.{name}", message=f"has a key of its own; give it as renderer.{name}")
            for name in self.options
            if name in type(self).model_fields
        ]
