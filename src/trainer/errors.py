"""The errors of a run that fails for a reason we can name."""


class RunError(Exception):
    """Shown without a traceback; the command ends with exit code 1."""


class PeerError(RunError):
    """This rank fails because another did. The launcher shows what that one has to say, if it says anything."""
