"""Where metrics go: the console, `metrics.jsonl`, Weights & Biases."""

from trainer.monitors.build import LateMonitors, Monitors, build_monitors, check_monitors, open_late_monitors

__all__ = ["LateMonitors", "Monitors", "build_monitors", "check_monitors", "open_late_monitors"]
