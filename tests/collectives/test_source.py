"""What a chapter prints as an algorithm's source is what runs, on every backend."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from dtlab import Comm, collectives, run, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.registry import chunk_edges, cut
from dtlab.topology import uniform

PACKAGE = Path(collectives.__file__).parent
CHAPTER = Path(__file__).resolve().parent.parent.parent / "notebooks" / "05_all_reduce.ipynb"


def profiled(comm: Comm) -> list[tuple[str, str]]:
    """The functions of `dtlab.collectives` that one ring calls: (file, name), each once."""
    seen: dict[tuple[str, str], None] = {}

    def see(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == PACKAGE:
            seen[path.name, frame.f_code.co_qualname] = None

    x = torch.ones(12)
    sys.setprofile(see)
    try:
        collectives.all_reduce(comm, x, algorithm="ring")
    finally:
        sys.setprofile(None)
    return list(seen)


@pytest.mark.parametrize("where", ["processes", "simulator"])
def test_a_profiler_sees_the_ring_that_chapter_05_prints(where: str) -> None:
    if where == "processes":
        called = run(profiled, ranks=2).values[0]
    else:
        called = simulate(profiled, network=uniform(2, 1e-6, 1e9)).values[0]
    source = inspect.getsource(ALGORITHMS["all_reduce"]["ring"])
    cells = nbformat.read(CHAPTER, as_version=4).cells
    (printed,) = [cell.outputs[0].data["text/markdown"]
                  for cell in cells if cell.id == "ring-source"]
    assert source in printed
    for helper in (cut, chunk_edges):  # the ring's chunks: nothing of it is out of sight
        assert inspect.getsource(helper) in printed
    assert "comm.sendrecv(" in source
    assert "comm.accumulate_(" in source
    loops = [name for file, name in called if file.startswith("all_")]
    assert loops == ["all_reduce", "ring"]  # the collective, then the algorithm itself
    assert ("all_reduce.py", "ring") in called
    helpers = {file for file, _ in called} - {"all_reduce.py"}
    assert helpers <= {"call.py", "registry.py", "auto.py"}
