"""Errors that leave dtlab are shown down to the learner's own line, and no further."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dtlab
from dtlab.tracebacks import CELL_FILE, with_cell_names

PACKAGE = str(Path(__file__).parents[1] / "dtlab")
CALLS = {
    "a rank raises": "simulate(fails, network=uniform(2, 0, 1))",
    "Stepper": "from dtlab.widgets import Stepper; Stepper(fn=lambda comm, x: x.nothing)",
    "a method that there is not": "simulate(barrier, network=uniform(2, 0, 1))",
    "a method, on processes": "dtlab.run(barrier, ranks=2)",
    "beyond contextlib": "dtlab.run(loads, ranks=2)",
    "torch.distributed": "simulate(connects, network=uniform(2, 0, 1))",
    "a bad argument": "uniform(-1, 0, 1)",
    "an unknown algorithm": "dtlab.cost.time_s('all_reduce', 'best', 4, 8, 1e-6, 1e-9)",
    "simulate interrupted": "timer(); simulate(endless, network=uniform(2, 0, 1))",
    "run interrupted": "timer(1.5); dtlab.run(endless, ranks=2, timeout=None)",
    "a session interrupted": "timer(1.5); dtlab.Session(2, timeout=None).execute('while 1: pass')",
}
CELLS = {"1 / 0": r"rank [01] raised ZeroDivisionError", "x = (": r"SyntaxError: '\(' was never"}
# To IPython like "a rank raises", and like "a bad argument": they leave dtlab at the same places.
ALIKE = ("a method that there is not", "torch.distributed", "an unknown algorithm")
SETUP = """
import _thread, threading, time, dtlab, torch
from dtlab import simulate
from dtlab.topology import uniform
def fails(comm): raise KeyError("lost")
def barrier(comm): comm.barrier()
def connects(comm): torch.distributed.init_process_group("gloo")
def loads(comm):
    dtlab.parallel.load("none", dtlab.parallel.DataParallel(torch.nn.Linear(1, 1), comm))
def endless(comm):
    while True: comm.split(0)
def timer(seconds=0.3): threading.Timer(seconds, _thread.interrupt_main).start()
"""


# Each file is executed as Python or IPython would, and what leaves it is shown as they show it.
EACH = """
import sys
for name in sys.argv[1:]:
    print("=====", file=sys.stderr, flush=True)
    try:
        exec(compile(open(name).read(), name, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
    sys.stderr.flush()
"""
EACH_IN_IPYTHON = """
%load_ext dtlab
import sys
for name in sys.argv[1:]:
    print("=====", flush=True)
    get_ipython().safe_execfile(name, {"__name__": "__main__", "get_ipython": get_ipython})
"""


@pytest.mark.parametrize("how", ["python", "IPython"])
def test_the_last_frame_is_the_learners(how: str, tmp_path: Path) -> None:
    calls = CALLS
    if how == "IPython":
        calls = {name: line for name, line in CALLS.items() if name not in ALIKE} | {
            cell: f"get_ipython().run_cell_magic('ranks', '2', '{cell}')" for cell in CELLS}
    for number, line in enumerate(calls.values()):
        (tmp_path / f"mine{number}.py").write_text(f"{SETUP}\n{line}  # mine\n")
    files = [f"mine{number}.py" for number in range(len(calls))]
    (tmp_path / "each.ipy").write_text(EACH_IN_IPYTHON)
    command = ["-c", EACH] if how == "python" else [
        "-m", "IPython", "--colors=NoColor", "--no-banner", "each.ipy"]
    got = subprocess.run([sys.executable, *command, *files], cwd=tmp_path, capture_output=True,
                         text=True, timeout=100)
    parts = (got.stdout + got.stderr).split("=====\n")[1:]
    for name, text in zip(calls, parts, strict=True):
        files = re.findall(r'^(?:  File "([^"]+)"|File ([^\s:]+):\d)', text, re.MULTILINE)
        assert "# mine" in text, name
        assert re.search(CELLS.get(name, "Error|Interrupt|Failed"), text), name
        if name in CELLS:
            assert PACKAGE not in text
            assert "interactiveshell.py" not in text
        assert [file for pair in files for file in pair if file.startswith(PACKAGE)] == [], name


def test_functions_that_call_each_other_without_end_leave_a_short_traceback() -> None:
    def even(n: int) -> int:
        return odd(n + 1)

    def odd(n: int) -> int:
        return even(n + 1)

    with pytest.raises(dtlab.RankFailed) as caught:
        dtlab.simulate(lambda comm: even(0), network=dtlab.topology.uniform(1, 0, 1))
    text = str(caught.value)
    assert "more calls]" in text
    assert len(text.splitlines()) < 150


def test_cells_are_found_in_a_text_of_any_length() -> None:
    """An exception may show a tensor, or a file, as one word."""
    began_s = time.monotonic()
    long = "x" * 100_000
    assert with_cell_names(long) == long
    assert CELL_FILE.sub("CELL", f'{long} File "/tmp/ipykernel_7/12.py", {long}') == (
        f'{long} File "CELL", {long}')
    assert time.monotonic() - began_s < 1
