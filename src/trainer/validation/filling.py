"""Fills the rows of the next forward passes in a thread, while the device works on this one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Filled = TypeVar("Filled")


def filled_ahead(fill: Callable[[Key], Filled], keys: Iterable[Key], *, ahead: int) -> Generator[Filled]:
    """What `fill` makes of each key, in order; made by one thread, at most `ahead` keys before it is asked for.

    Close the generator to leave early: the thread has ended then.

    Raises:
        whatever `fill` raised, where its result would have come.
    """
    under_way: deque[Future[Filled]] = deque()
    with ThreadPoolExecutor(1, "validation rows") as thread:
        try:
            for key in keys:
                under_way.append(thread.submit(fill, key))
                if len(under_way) > ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
