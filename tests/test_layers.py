"""The house stands: a room imports only from rooms below it, and no file outgrows its reader."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "dtlab"

# From the ground up. Rooms on one line stand side by side and don't import each other.
FLOORS = (
    "errors",
    "cores labels machine reduction units",
    "comm trace tracebacks output calls",
    "result matching patience relay",
    "topology",
    "cost",
    "collectives",
    "ps parallel models",
    "simulator",
    "processes",
    "bench calibration wires",
    "grading",
    "plots",
    "widgets",
    "cli",
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
PAGE_LINES = 350  # "about 300", and not a line more than that bears


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
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
    here = FLOOR_OF[room_of(importer)]
    wrong = []
    for line, module in imported(source, importer):
        room = room_of(module)
        # `import dtlab` gives all names of the contract, which reach up to `processes`.
        floor = FLOOR_OF.get(room, FLOOR_OF["processes"])
        if room != room_of(importer) and floor >= here:
            wrong.append(f"{line}: {importer} imports {module}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    importer = name_of(path)
    if importer in ("dtlab", "dtlab.__main__"):
        return  # the front door shows every room
    assert room_of(importer) in FLOOR_OF, f"{importer} is a new room: give it a floor in FLOORS"
    assert misplaced(path.read_text(), importer) == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("dtlab.collectives.ring", "from dtlab.simulator import simulate"),
        ("dtlab.cost.model", "import dtlab.collectives.registry"),
        ("dtlab.comm", "from dtlab import topology"),
        ("dtlab.simulator.engine", "def f():\n    from dtlab import run"),
        ("dtlab.plots.timeline", "from dtlab.widgets import player"),
        ("dtlab.trace", "from dtlab.output import RankOutput"),
        ("dtlab.collectives.ring", "from ..processes import run"),
    ],
)
def test_an_import_that_goes_up_is_found(importer: str, source: str) -> None:
    assert len(misplaced(source, importer)) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("dtlab.cli.demo", "import dtlab"),
        ("dtlab.collectives.ring", "from dtlab.collectives.registry import algorithm"),
        ("dtlab.grading.check", "import dtlab.simulator"),
        ("dtlab.errors", "import dataclasses"),
    ],
)
def test_an_import_that_goes_down_passes(importer: str, source: str) -> None:
    assert misplaced(source, importer) == []


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_file_is_no_longer_than_a_reader_bears(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= PAGE_LINES


def test_algorithms_know_nothing_of_how_they_are_run() -> None:
    """The idea that holds the house together: a collective sees a communicator, and no more."""
    for path in (PACKAGE / "collectives").glob("*.py"):
        rooms = {room_of(module) for _, module in imported(path.read_text(), name_of(path))}
        assert rooms <= {"collectives", "comm", "cost", "errors", "machine", "reduction",
                         "relay"}, path


def test_ranks_start_without_what_only_simulations_need() -> None:
    """The first `run` waits for these imports; and what is not loaded can be found all the same."""
    code = ("import sys, dtlab.processes.rank, dtlab; print('networkx' in sys.modules, "
            "{'simulate', 'topology', 'run', 'check', 'plots'} <= set(dir(dtlab)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
