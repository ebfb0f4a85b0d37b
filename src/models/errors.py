"""What is wrong with an architecture or with adapters, at which of their fields."""

_LONGEST_LINE = 300


def one_line(error: Exception) -> str:
    """The beginning of a foreign error's message, on one line; its name where it has none."""
    return " ".join(str(error).split())[:_LONGEST_LINE] or type(error).__name__


class ArchError(ValueError):
    """An architecture that cannot be built: unknown, inconsistent, or asking for what we do not implement."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        """Field of `model.arch`, or "" when it is about the whole."""
        self.message = message


class AdapterError(ValueError):
    """Adapters that cannot be put into a model."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        """Field of `model.lora`."""
        self.message = message
