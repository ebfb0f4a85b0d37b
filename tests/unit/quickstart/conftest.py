"""The scripts of the quickstart as modules."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Gives a new module of a script, by its name without the ending."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
