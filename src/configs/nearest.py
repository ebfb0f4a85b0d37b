"""The nearest valid name for a key or word that is not one."""

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel

from configs.schema import Key, all_keys, dotted

NUM_SHOWN = 3
"""A name that many tables have is not listed in all of them."""


def nearest_word(word: str, words: Iterable[str]) -> str | None:
    """The closest of `words`, or None where none is close."""
    folded = {candidate.lower(): candidate for candidate in words}
    matches = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def nearest_keys(root: type[BaseModel], key: Key, siblings: Iterable[str]) -> list[str]:
    """Full dotted keys that may have been meant by the unknown `key`.

    In this order: a sibling spelled nearly so; the same name in another section; a sibling spelled somewhat so, or
    whose name is made of this one's initials (`learning_rate`, `lr`) or the reverse; any key spelled nearly so.
    """
    *above, name = key
    name = name.replace("-", "_").lower()
    siblings = list(siblings)
    sibling = nearest_word(name, siblings)
    if sibling is not None and get_close_matches(name, [sibling.lower()], cutoff=0.8):
        return [dotted((*above, sibling))]
    every_key = all_keys(root)
    elsewhere = [candidate for candidate in every_key if candidate[-1] == name]
    if elsewhere:
        return [dotted(candidate) for candidate in elsewhere[:NUM_SHOWN]]
    if sibling is None:
        sibling = next((other for other in siblings if _initials(name) == other or _initials(other) == name), None)
    if sibling is not None:
        return [dotted((*above, sibling))]
    names = {candidate[-1]: candidate for candidate in reversed(every_key)}
    match = get_close_matches(name, names, n=1, cutoff=0.75)
    return [dotted(names[match[0]])] if match else []


def did_you_mean(names: list[str]) -> str:
    """`; did you mean a or b?`, or nothing."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _initials(name: str) -> str:
    parts = [part for part in name.split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else ""
