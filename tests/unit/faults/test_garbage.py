"""When Python's garbage is collected."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from trainer.garbage import GarbageCollection


class Node:
    """Something that only a collection can free once it points to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_it_collects_at_its_steps_alone() -> None:
    garbage = GarbageCollection(3)
    garbage.start()
    garbage.after_step(5)  # the first of this attempt
    assert not gc.isenabled() and gc.get_freeze_count() > 1000
    cycle = weakref.ref(Node())
    for step in (7, 8):
        garbage.after_step(step)
        assert cycle() is not None
    garbage.after_step(9)
    assert cycle() is None


def test_what_the_first_step_makes_is_set_aside() -> None:
    garbage = GarbageCollection(50)
    garbage.start()
    before = gc.get_freeze_count()
    kept = [Node() for _ in range(100)]
    garbage.after_step(1)
    assert gc.get_freeze_count() >= before + len(kept)


def test_python_has_its_own_way_back_in_the_end() -> None:
    garbage = GarbageCollection(3)
    garbage.start()
    garbage.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_without_an_interval_nothing_changes() -> None:
    frozen = gc.get_freeze_count()
    garbage = GarbageCollection(None)
    garbage.start()
    garbage.after_step(1)
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    garbage.close()
