"""Where metrics go: the console, `metrics.jsonl`, Weights & Biases."""

from trainer.monitors.build import Monitors, build_monitors, check_monitors

__all__ = ["Monitors", "build_monitors", "check_monitors"]
