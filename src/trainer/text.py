"""Numbers, lists and errors in the words of messages."""

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's name where it has none."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c, d, e, and 3 more`."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def show_bytes(num_bytes: int) -> str:
    """In MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def show_seconds(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def with_unit(number: float) -> str:
    """Three or four digits and k, M, B or T."""
    for unit in ("", "k", "M", "B", "T"):
        if abs(number) < 999.5 or unit == "T":
            break
        number /= 1000
    return f"{number:.3g}{unit}" if abs(number) < 1000 else f"{number:.0f}{unit}"
