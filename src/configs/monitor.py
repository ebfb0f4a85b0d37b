"""`[monitors]` and `[log]`."""

from typing import Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault


class WandbConfig(BaseConfig):
    """`[monitors.wandb]`"""

    project: str = "oneloop"
    """Project of the run."""

    entity: str | None = None
    """Team or user; None: the account's default."""

    name: str | None = None
    """Name shown; None: the run's name."""

    group: str | None = None
    """Group of runs."""

    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run directory, to be sent later with `wandb sync`."""

    offline: bool = False
    """The same as `mode = "offline"`, by prime-rl's name."""

    @property
    def resolved_mode(self) -> Literal["online", "offline"]:
        """What `mode` and `offline` come to."""
        return "offline" if self.offline else self.mode


class WebhookConfig(BaseConfig):
    """`[monitors.webhook]`: messages about the run to an address of the web, as JSON."""

    url_variable: str = "ONELOOP_WEBHOOK_URL"
    """Environment variable with the URL: whoever has it can post, so it stands in no file."""

    step_seconds: float | None = Field(default=3600.0, gt=0)
    """Tell the step so often. None: only the start and the end."""

    def table_faults(self) -> list[Fault]:
        if self.url_variable.isascii() and self.url_variable.isidentifier():
            return []
        # Without the value: it may be the URL itself.
        message = "is no name of an environment variable; the URL stands in the environment, and its name here"
        return [Fault(key="url_variable", message=message)]


class MonitorsConfig(BaseConfig):
    """`[monitors]`: besides the console and metrics.jsonl, which are always on."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""

    webhook: WebhookConfig | None = None
    """Messages to an address of the web: started, step, stopped, finished, failed."""


class LogConfig(BaseConfig):
    """`[log]`"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level shown on the console and in the rank logs."""

    interval: int = Field(default=1, ge=1)
    """Print a console line every interval-th step; metrics.jsonl and wandb get every step."""

    checksum_interval: int | None = Field(default=None, ge=1)
    """Every interval-th step record a checksum of the parameters, `digest/params`, for `compare-runs`."""
