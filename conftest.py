"""Rules for all that pytest runs here: tests/, and the cells of notebooks/ through nbval."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbval.kernel
import pytest
from jupyter_client import KernelManager
from nbval.plugin import IPyNbCell

ROOT = Path(__file__).resolve().parent
# What takes long begins first, so that no worker has it left when the others are done; cells are
# short, so the browser, which now and then waits to be alone, doesn't wait long for them.
LONG_FIRST = ("tests/browser/", "notebooks/", "tests/ps/test_killed.py", "tests/exercises/",
              "tests/ps/", "tests/processes/", "tests/notebooks/", "tests/grading/",
              "tests/parallel/", "tests/test_cli")
RANK_LINES = re.compile(r"(?:^\[rank \d+\].*\n?)+", flags=re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=12, metavar="N",
                     help="how many servers tests/ps/test_killed.py kills")
    parser.addoption("--recoveries", type=int, default=5, metavar="N",
                     help="how many ranks tests/parallel/test_recovery.py kills for each answer")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process names the locks for its workers
        folder = ROOT / ".pytest_cache"
        folder.mkdir(exist_ok=True)
        os.environ["DTLAB_TEST_LOCK"] = str(folder / f"beside-{os.getpid()}")
        # A chapter calibrates this machine; what it finds while tests run is for nobody to keep.
        os.environ["DTLAB_CACHE"] = tempfile.mkdtemp(prefix="dtlab-")
        # A worker for each core: with more threads than that, torch's wait for each other, and a
        # small training takes up to 40 times as long.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for told_to_make in ("ARGS", "MAKEFLAGS", "MAKELEVEL"):  # a test may call make, too
            os.environ.pop(told_to_make, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        for end in (".room", ".door"):
            Path(os.environ["DTLAB_TEST_LOCK"] + end).unlink(missing_ok=True)
        shutil.rmtree(os.environ["DTLAB_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        return next((place for place, name in enumerate(LONG_FIRST)
                     if item.nodeid.startswith(name)), len(LONG_FIRST))

    items.sort(key=turn)  # and otherwise in the order in which they were found


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `alone` waits until no worker runs another one, and keeps others out.

    A lock between the workers of one run, shared by most tests and exclusive for some. Whoever
    enters the room passes the door one at a time; someone who wants to be alone waits inside the
    door, so nobody overtakes him.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    path = os.environ["DTLAB_TEST_LOCK"]
    mode = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with open(path + ".room", "w") as room:
        with open(path + ".door", "w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, mode)
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was not proved, and why: each reason says what it takes."""
    skipped: dict[str, set[str]] = {}
    for report in terminalreporter.getreports("skipped"):
        skipped.setdefault(report.longrepr[2].removeprefix("Skipped: "), set()).add(report.nodeid)
    lines = [f"{len(tests)} skipped: {reason}" for reason, tests in skipped.items()]
    passed = terminalreporter.getreports("passed")
    if any("::test_kills_at_any_moment" in report.nodeid for report in passed):
        kills = terminalreporter.config.getoption("kills")
        lines.append(f"only {kills} servers were killed: "
                     "pytest tests/ps/test_killed.py --kills 600 proves more")
    for report in passed:
        for answer, slowest_s in report.user_properties:
            if "::test_recovers_from_kills" in report.nodeid:
                recoveries = terminalreporter.config.getoption("recoveries")
                lines.append(f"only {recoveries} recoveries by {answer}, the slowest in "
                             f"{slowest_s:.2f} s: pytest tests/parallel/test_recovery.py -k kills "
                             f"--recoveries 30 proves more")
    if lines:
        terminalreporter.section("not proved here")
        terminalreporter.write_line("\n".join(lines))


# ---- notebooks ----------------------------------------------------------------------------------

def kernel_on_files(**options: Any) -> KernelManager:
    """A kernel that listens on files, not on ports: these are chosen before it starts, and when it
    listens, a process of another test may have taken one."""
    place = Path(tempfile.mkdtemp(dir=os.environ["DTLAB_CACHE"])) / "kernel"
    return KernelManager(transport="ipc", ip=str(place), **options)


nbval.kernel.KernelManager = kernel_on_files


def in_order_of_ranks(text: str) -> str:
    """Real ranks print in any order among each other: sort neighbouring lines by their rank.

    Each rank's own lines keep their order.
    """

    def sort(found: re.Match[str]) -> str:
        lines = found[0].splitlines(keepends=True)
        return "".join(sorted(lines, key=lambda line: int(line[6 : line.index("]")])))

    return RANK_LINES.sub(sort, text)


def sanitize(cell: IPyNbCell, text: object) -> object:
    """What nbval compares, on both sides: see also tests/nbval_sanitize.cfg."""
    return _sanitize(cell, in_order_of_ranks(text) if isinstance(text, str) else text)


_sanitize = IPyNbCell.sanitize
IPyNbCell.sanitize = sanitize
