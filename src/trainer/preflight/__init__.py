"""What a run will be, and whether it can be: everything that is known without a GPU, before anything is started.

The launcher calls `preflight`, or `preflight_scoring` where nothing is trained. Workers call `prepare` and `plan_run`,
or `prepare_model`, for themselves and come to the same.
"""

from trainer.preflight.inputs import Inputs, ModelInputs, prepare, prepare_model
from trainer.preflight.memory import memory_lines
from trainer.preflight.plan import Plan, plan_run
from trainer.preflight.run import preflight, preflight_scoring

__all__ = [
    "Inputs",
    "ModelInputs",
    "Plan",
    "memory_lines",
    "plan_run",
    "preflight",
    "preflight_scoring",
    "prepare",
    "prepare_model",
]
