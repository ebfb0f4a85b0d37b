"""The error of a run that fails for a reason we can name."""


class RunError(Exception):
    """Shown without a traceback; the command ends with exit code 1."""
