"""Where metrics go: the console, `metrics.jsonl`, Weights & Biases."""

from trainer.monitors.build import EvalMonitors, Monitors, build_monitors, check_monitors, open_eval_monitors

__all__ = ["EvalMonitors", "Monitors", "build_monitors", "check_monitors", "open_eval_monitors"]
