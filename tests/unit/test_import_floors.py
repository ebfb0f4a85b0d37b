"""The floors of the house: imports only go down, nothing goes in circles, no file or function needs a map of its own.

All imports count: those inside functions and those for the type checker alone as well. See docs/architecture.md.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# From the top floor to the ground. A room may import rooms of lower floors and, if that makes no circle, of its own.
# A new room needs a place here.
FLOORS: tuple[tuple[str, ...], ...] = (
    # commands and processes
    (
        "trainer.sft",
        "trainer.node",
        "trainer.tokenize",
        "trainer.inspect",
        "trainer.export",
        "trainer.reports",
        "trainer.eval_worker",
    ),
    ("trainer.command",),
    ("trainer.launch", "trainer.worker", "trainer.slurm"),
    ("trainer.elastic", "trainer.peers", "trainer.rank_failures", "trainer.watchdog", "trainer.faults"),
    # the loop
    ("trainer.train", "trainer.evaluate"),
    # from the config to the parts of a run, and from a step to its report
    ("trainer.preflight", "trainer.report", "trainer.stragglers"),
    ("trainer.snapshots",),
    ("trainer.memory", "trainer.state", "trainer.model_setup", "trainer.model_source", "trainer.adapters"),
    # the parts of a step
    ("trainer.validation", "trainer.optim", "trainer.checkpoint", "trainer.micro_batch", "trainer.metrics"),
    ("trainer.weights",),
    ("trainer.hooks", "trainer.nan_guard"),
    # ranks
    ("trainer.parallel",),
    # what knows one rank only
    ("trainer.data", "trainer.monitors", "trainer.logs", "trainer.tokenizer", "trainer.run_dir"),
    ("trainer.attempts", "trainer.webhook"),
    ("trainer.progress", "trainer.perf", "trainer.run", "trainer.files", "trainer.locks", "trainer.pinned"),
    ("trainer.failures", "trainer.flight_recorder", "trainer.heartbeat", "trainer.garbage"),
    ("trainer.text", "trainer.errors"),
    # networks
    ("models.registry", "models.init", "models.lora"),
    ("models.dense", "models.hf"),
    ("models.base", "models.hf_config"),
    ("models.counts", "models.layers"),
    ("models.batch", "models.errors", "models.shards"),
    # config tables
    ("configs",),
)

# Exceptions to "may import what lies lower": these rooms know even less.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "configs": ("torch", "transformers", "numpy", "datatrove", "wandb", "models", "trainer"),
    "models": ("configs", "trainer", "datatrove", "wandb"),
    "trainer.data": ("trainer.monitors", "trainer.progress", "trainer.logs", "trainer.run", "trainer.run_dir"),
    "trainer.checkpoint": ("trainer.optim", "trainer.data", "trainer.state", "trainer.micro_batch", "models"),
    "trainer.optim": ("models",),
}


@dataclass(frozen=True, kw_only=True)
class Import:
    importer: str
    line: int
    imported: str


def modules_of(root: Path) -> dict[str, Path]:
    """All modules below `root`, by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Every import statement of a module, wherever it stands, as the modules it names."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            names = [name if name in modules else origin for name in inner]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else "<computed>"]
        for name in dict.fromkeys(names):
            yield Import(importer=module, line=getattr(node, "lineno", 0), imported=name)


def lies_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str | None:
    """The room a module lies in; None for other people's modules and for the empty package files."""
    return next((room for floor in FLOORS for room in floor if lies_in(module, room)), None)


def floor_of(room: str) -> int:
    """Height above the ground."""
    return next(len(FLOORS) - number for number, floor in enumerate(FLOORS) if room in floor)


def all_imports(root: Path) -> list[Import]:
    modules = modules_of(root)
    return [found for module, path in modules.items() for found in imports_of(module, path, modules)]


def upward(imports: list[Import]) -> list[str]:
    """Imports of a room on a higher floor, or of something that the room must not know."""
    faults = []
    for found in imports:
        here, there = room_of(found.importer), room_of(found.imported)
        where = f"{found.importer}:{found.line} imports {found.imported}"
        if here is not None and there is not None and floor_of(there) > floor_of(here):
            faults.append(f"{where}, which lies on a higher floor")
        for room, others in FORBIDDEN.items():
            if lies_in(found.importer, room) and any(lies_in(found.imported, other) for other in others):
                faults.append(f"{where}, which {room} must not know")
    return faults


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """The strongly connected groups of more than one node: what imports each other in circles (Tarjan, 1972)."""
    following: dict[str, set[str]] = {}
    for a, b in edges:
        if a != b:
            following.setdefault(a, set()).add(b)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(following.get(node, ())):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(following):
        if node not in order:
            visit(node)
    return found


def test_every_module_has_a_floor() -> None:
    packages = {"configs", "models", "trainer"}
    homeless = [module for module in modules_of(SOURCES) if room_of(module) is None and module not in packages]
    assert homeless == [], "give these a place in FLOORS"


def test_every_place_is_taken() -> None:
    """A room that is gone leaves the table."""
    rooms = [room for floor in FLOORS for room in floor]
    modules = modules_of(SOURCES)
    assert [room for room in rooms if not any(lies_in(module, room) for module in modules)] == []


def test_imports_only_go_down() -> None:
    assert upward(all_imports(SOURCES)) == []


def test_no_module_is_in_a_circle() -> None:
    modules = modules_of(SOURCES)
    assert circles({(i.importer, i.imported) for i in all_imports(SOURCES) if i.imported in modules}) == []


def test_no_rooms_are_in_a_circle() -> None:
    edges = {(room_of(found.importer), room_of(found.imported)) for found in all_imports(SOURCES)}
    assert circles({(a, b) for a, b in edges if a is not None and b is not None}) == []


def test_no_import_is_computed() -> None:
    """What is imported by a name made at run time escapes this file."""
    assert [found for found in all_imports(SOURCES) if found.imported == "<computed>"] == []


def test_configs_load_without_torch_and_transformers() -> None:
    """Not through others either: the command line must answer at once."""
    names = [module for module in modules_of(SOURCES) if lies_in(module, "configs")]
    code = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=SOURCES, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_no_file_needs_a_map() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in modules_of(SOURCES).items()}
    assert {module: length for module, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_every_function_fits_on_a_screen_or_two() -> None:
    long = {}
    for module, path in modules_of(SOURCES).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{module}.{node.name}"] = length
    assert long == {}


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("trainer/data/x.py", "def f():\n    from trainer.train import train", "data.x:2 imports trainer.train, which"),
        (
            "trainer/optim/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trainer.train",
            "optim.x:3 imports trainer.train, which lies on a higher floor",
        ),
        ("trainer/optim/x.py", "from .. import train", "optim.x:1 imports trainer.train, which lies on a higher floor"),
        ("trainer/optim/x.py", "from ..train import train", "optim.x:1 imports trainer.train, which lies on a higher"),
        ("trainer/optim/x.py", "import importlib\nimportlib.import_module('trainer.train')", "optim.x:2 imports trai"),
        ("configs/x.py", "import torch.nn", "configs.x:1 imports torch.nn, which configs must not know"),
        ("models/layers/x.py", "from configs import model", "models.layers.x:1 imports configs, which models must"),
    ],
)
def test_the_check_itself_finds_a_fault(tmp_path: Path, module: str, code: str, fault: str) -> None:
    for name, text in ((module, code), ("trainer/train.py", ""), ("trainer/__init__.py", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (found,) = upward(all_imports(tmp_path))
    assert fault in found


def test_the_check_itself_finds_circles() -> None:
    edges = {("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "d"), ("e", "f"), ("f", "e"), ("f", "a")}
    assert circles(edges) == [["a", "b", "c"], ["e", "f"]]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []
