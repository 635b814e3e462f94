"""The architecture: a layer imports only layers below it, no modules import each other in a circle,
and no file is too long."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "dtlab"

# From the ground up. Rooms on one line stand side by side and don't import each other.
LEVELS = (
    "errors jupyter",
    "checks tracebacks",
    "machine reduction units",
    "comm trace",
    "result",
    "topology",
    "cost",
    "collectives reliability",
    "models",
    "ps parallel",
    "ranks",
    "simulator",
    "processes",
    "bench calibration published testbed wires",
    "grading",
    "recording",
    "plots",
    "widgets",
    "cli",
)
LEVEL_OF = {layer: number for number, layers in enumerate(LEVELS) for layer in layers.split()}
PAGE_LINES = 350  # "about 300", and not a line more than that bears


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    """"dtlab.cost.model" → "cost"; "dtlab" itself → ""."""
    return [*module.split("."), ""][1]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, importer: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every dtlab module that `source` imports, at the top or in a function."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*importer.split(".")[: -node.level], base]).rstrip(".")
            # `from dtlab import cost` imports dtlab.cost
            names = [f"{base}.{a.name}" if base == "dtlab" else base for a in node.names]
        for name in names:
            if name.split(".")[0] == "dtlab":
                yield node.lineno, name


def misplaced(source: str, importer: str) -> list[str]:
    """The imports that go up or sideways, as `line: importer imports module`."""
    here = LEVEL_OF[layer_of(importer)]
    wrong = []
    for line, module in imported(source, importer):
        layer = layer_of(module)
        # `import dtlab` gives all names of the contract, which reach up to `processes`.
        level = LEVEL_OF.get(layer, LEVEL_OF["processes"])
        if layer != layer_of(importer) and level >= here:
            wrong.append(f"{line}: {importer} imports {module}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_layer_imports_only_layers_below_it(path: Path) -> None:
    importer = name_of(path)
    if importer in ("dtlab", "dtlab.__main__"):
        return  # the front door shows every layer
    assert layer_of(importer) in LEVEL_OF, f"{importer} is a new layer: give it a level in LEVELS"
    assert misplaced(path.read_text(), importer) == []


@pytest.mark.parametrize(
    ("importer", "source", "goes_up"),
    [
        ("dtlab.collectives.ring", "from dtlab.simulator import simulate", True),
        ("dtlab.cost.model", "import dtlab.collectives.registry", True),
        ("dtlab.comm", "from dtlab import topology", True),
        ("dtlab.simulator.engine", "def f():\n    from dtlab import run", True),
        ("dtlab.plots.timeline", "from dtlab.widgets import player", True),
        ("dtlab.trace", "from dtlab.ranks.output import RankOutput", True),
        ("dtlab.collectives.ring", "from ..processes import run", True),
        ("dtlab.cli.demo", "import dtlab", False),
        ("dtlab.collectives.ring", "from dtlab.collectives.registry import algorithm", False),
        ("dtlab.grading.learner_check", "import dtlab.simulator", False),
        ("dtlab.errors", "import dataclasses", False),
    ],
)
def test_an_import_that_goes_up_is_found(importer: str, source: str, goes_up: bool) -> None:
    assert len(misplaced(source, importer)) == goes_up


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_file_is_no_longer_than_a_reader_bears(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= PAGE_LINES


def imported_modules(path: Path) -> set[str]:
    """The dtlab modules that a module imports, anywhere in it. What `from package import module`
    means is the module; a package's own `__init__` only collects names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtlab."):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("dtlab.")}
    return found


MODULES = {name_of(path): path for path in modules()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count, too."""
    graph = nx.DiGraph((name, other) for name, path in MODULES.items()
                       for other in imported_modules(path) if other in MODULES)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph)
               if len(circle) > 1]
    assert circles == []


def test_nothing_is_looked_for_on_a_communicator_by_name() -> None:
    """What every backend provides stands in `Comm`; no algorithm finds out that there is more."""
    wrong = [f"{name}:{node.lineno}" for name, path in MODULES.items()
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
             and node.func.id in ("getattr", "hasattr")
             and ast.unparse(node.args[0]).split(".")[-1] in ("comm", "_comm", "group", "stream")]
    assert wrong == []


def test_algorithms_know_nothing_of_how_they_are_run() -> None:
    """The idea that holds the house together: a collective sees a communicator, and no more."""
    for path in (PACKAGE / "collectives").glob("*.py"):
        layers = {layer_of(module) for _, module in imported(path.read_text(), name_of(path))}
        assert layers <= {"checks", "collectives", "comm", "cost", "errors", "machine",
                          "reduction"}, path


def test_plots_only_draw() -> None:
    """What they draw was recorded or measured before: of `dtlab.recording` they take data types."""
    for path in (PACKAGE / "plots").glob("*.py"):
        tree, name = ast.parse(path.read_text()), name_of(path)
        layers = {layer_of(module) for _, module in imported(path.read_text(), name)}
        assert not layers & {"", "simulator", "processes"}, path
        called = {ast.unparse(node.func).split(".")[-1] for node in ast.walk(tree)
                  if isinstance(node, ast.Call)}
        assert not called & {"simulate", "run"}, path
        recorded = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and layer_of(node.module or "") == "recording" for alias in node.names]
        assert all(name[0].isupper() for name in recorded), path


def test_ranks_start_without_what_only_simulations_need() -> None:
    """The first `run` waits for these imports; and what is not loaded can be found all the same."""
    code = ("import sys, dtlab.processes.rank_main, dtlab; print('networkx' in sys.modules, "
            "{'simulate', 'topology', 'run', 'check', 'plots'} <= set(dir(dtlab)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
