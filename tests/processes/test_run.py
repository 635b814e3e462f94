"""`run`: any function, any arguments, any results; and what ranks find around them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlab import Comm, UnwaitedWork, run
from dtlab.collectives import barrier

FACTOR = 3  # a global that a function below uses


class Point:
    """A class of a module that is not installed: it travels by value."""

    def __init__(self, x: int):
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


def scaled(comm: Comm, x: int) -> int:
    return FACTOR * x + comm.rank


@pytest.mark.parametrize(("how", "ranks"), [({"ranks": 1}, 1), ({"ranks": 5}, 5), ({}, 4)])
def test_values_come_back_by_rank(how: dict[str, int], ranks: int) -> None:
    result = run(lambda comm: (comm.rank, comm.size), **how)
    assert result.values == [(rank, ranks) for rank in range(ranks)]
    assert result.ranks == ranks
    assert 0 < result.elapsed_s < 60


def test_submodules_that_only_the_caller_has_imported_are_there() -> None:
    import xml.sax.saxutils

    assert run(lambda comm: xml.sax.saxutils.escape("<"), ranks=1).values == ["&lt;"]


def test_any_function_runs() -> None:
    offset = 10

    def closure(comm: Comm) -> int:
        def nested() -> int:
            return offset + comm.rank

        return nested()

    class Callable:
        def __call__(self, comm: Comm) -> int:
            return offset + comm.rank

        def method(self, comm: Comm) -> int:
            return self.kept + comm.rank

        @cached_property
        def kept(self) -> int:
            return offset

    functions = (closure, lambda comm: offset + comm.rank, Callable(), Callable().method,
                 partial(lambda by, comm: by + comm.rank, offset))
    for function in functions:
        assert run(function, ranks=2).values == [10, 11]


def test_functions_that_share_a_nonlocal_variable_still_do() -> None:
    def make() -> tuple[Callable[[], int], Callable[[], int]]:
        count = 0

        def add() -> int:
            nonlocal count
            count += 1
            return count if count > 2 else add()  # its own cell holds it: a circle

        return add, lambda: count

    add, look = make()
    assert run(lambda comm: (add(), look()), ranks=2).values == [(3, 3)] * 2
    assert run(lambda comm, one, other: (one(), other()), add, look, ranks=2).values == [(3, 3)] * 2
    assert look() == 0  # the caller's own


def test_a_redefined_function_is_the_new_one() -> None:
    module = types.ModuleType("a_cell")
    for answer in ("old", "new"):
        exec(f"class C:\n  word = {answer!r}\ndef f(comm): return C.word", module.__dict__)
        assert run(module.f, ranks=2).values == [answer, answer]


def test_a_changed_global_has_its_new_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100)
    assert run(scaled, 1, ranks=2).values == [100, 101]


def test_objects_of_local_classes_come_back_as_what_they_were() -> None:
    sent = Point(4)
    back = run(lambda comm, point: (type(point), Point(point.x + comm.rank)), sent, ranks=2).values
    assert [point for _, point in back] == [Point(4), Point(5)]
    assert all(kind is Point for kind, _ in back)


def test_a_model_of_a_script_is_saved_whole_in_a_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import dtlab, torch
class Net(torch.nn.Linear): pass
def save(comm): torch.save(Net(2, 1), f"{comm.rank}.pt")
dtlab.run(save, ranks=2)
print(type(torch.load("1.pt", weights_only=False)) is Net)
""")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64,
                                   torch.float8_e4m3fn, torch.int64, torch.uint16])
def test_tensors_large_and_small_travel_both_ways(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (5,), (300, 400)):
        x = torch.randint(0, 2, shape).to(dtype)
        ones, y = run(lambda comm, x: (x.to(torch.complex64).real.sum(), x), x, ranks=1).values[0]
        assert y.dtype == dtype
        assert y.shape == x.shape
        assert ones == x.to(torch.complex64).real.sum()
        assert torch.equal(y.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))


def test_views_gradients_and_arrays_travel() -> None:
    base = torch.arange(200_000.0).reshape(400, 500)
    things = {
        "transposed": base.t(), "row": base[3], "leaf": torch.ones(20_000, requires_grad=True),
        "array": np.arange(100_000.0), "strided": np.arange(100_000.0)[::3],
        "model": torch.nn.Linear(200, 200),
    }
    back = run(lambda comm, things: things, things, ranks=2).values[1]
    for name in ("transposed", "row", "leaf"):
        assert torch.equal(back[name], things[name])
    assert back["leaf"].requires_grad
    for name in ("array", "strided"):
        assert np.array_equal(back[name], things[name])
    assert torch.equal(back["model"].weight, things["model"].weight)
    back["array"][0] = 7  # writable, like any array
    back["leaf"].data[0] = 7


def test_tensors_that_share_memory_still_do_in_each_ranks_own_copy() -> None:
    flat = torch.zeros(1_000_000)

    def write(comm: Comm, flat: torch.Tensor, parts: list[torch.Tensor]) -> float:
        parts[1] += comm.rank + 1
        barrier(comm)
        return flat.sum().item()

    assert run(write, flat, list(flat.split(10_000)), ranks=2).values == [10_000.0, 20_000.0]
    assert flat.sum() == 0


def test_a_large_argument_is_shared_not_copied() -> None:
    """Two ranks that read 400 MB hold its pages together: none has 400 MB of its own."""
    x = torch.ones(100_000_000)

    def private_kB(comm: Comm, x: torch.Tensor) -> int:  # noqa: N802
        assert x.sum() == x.numel()
        barrier(comm)  # who is alone with a page counts it as its own
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        barrier(comm)
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs Linux's /proc")
    assert max(run(private_kB, x, ranks=2).values) < 200_000


def test_torch_distributed_works_inside() -> None:
    def everything(comm: Comm) -> tuple[float, int, int]:
        x = torch.full((3,), comm.rank + 1.0)
        dist.all_reduce(x)
        group = dist.new_group([0, 1])
        assert (dist.get_rank(group) >= 0) == (comm.rank < 2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        return x.sum().item(), dist.get_rank(), dist.get_world_size()

    assert run(everything, ranks=3).values == [(18.0, rank, 3) for rank in range(3)]


def test_ranks_stand_where_the_caller_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("MY_SETTING", "on")

    def look(comm: Comm) -> tuple[str, str | None, int, torch.dtype]:
        import beside_the_notebook

        return (os.getcwd(), os.environ.get("MY_SETTING"), beside_the_notebook.answer,
                torch.ones(1).dtype)

    torch.set_default_dtype(torch.float64)
    try:
        assert run(look, ranks=1).values == [(str(tmp_path), "on", 42, torch.float64)]
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_thread_a_rank_unless_told_otherwise() -> None:
    def threads(comm: Comm) -> tuple[int, str]:
        torch.ones(200, 200) @ torch.ones(200, 200)
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run(threads, ranks=2).values == [(1, "1")] * 2
    assert run(threads, ranks=1, threads=2).values == [(2, "2")]


def test_random_numbers_differ_between_ranks_and_runs_where_python_says_so() -> None:
    def draw(comm: Comm) -> tuple[float, float]:
        import random

        return float(np.random.rand()), random.random()

    drawn = run(draw, ranks=3).values + run(draw, ranks=3).values
    assert len(set(drawn)) == 6


def test_a_run_within_a_rank() -> None:
    def inner(comm: Comm) -> int:
        return comm.rank

    def outer(comm: Comm) -> list[int]:
        return run(inner, ranks=2, echo=False).values if comm.rank == 1 else []

    assert run(outer, ranks=2).values == [[], [0, 1]]


def test_children_that_a_rank_forks_do_not_answer_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    def forks(comm: Comm) -> str:
        for end in (None, ZeroDivisionError("in the child"), SystemExit(3)):
            if (child := os.fork()) == 0:
                if end is not None:
                    raise end
                return "the child"
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return f"the parent of {codes}"

    codes: list[int] = []
    assert run(forks, ranks=2).values == ["the parent of [0, 1, 3]"] * 2
    assert capfd.readouterr().out.count("ZeroDivisionError: in the child") == 2


@pytest.mark.slow
def test_many_threads_in_the_parent_and_runs_at_once() -> None:
    stop = threading.Event()
    idle = [threading.Thread(target=stop.wait) for _ in range(30)]
    for thread in idle:
        thread.start()
    try:
        torch.ones(500, 500) @ torch.ones(500, 500)  # torch's own threads
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run, scaled, n, ranks=2, echo=False) for n in range(12)]
            assert [r.result().values for r in runs] == [[3 * n, 3 * n + 1] for n in range(12)]
    finally:
        stop.set()


def test_the_trace_counts_what_moved_and_was_computed_and_when() -> None:
    def ring(comm: Comm) -> None:
        into = torch.empty(100)
        shift = comm.labelled("shift")
        shift.sendrecv(torch.ones(100), (comm.rank + 1) % 3, into, (comm.rank - 1) % 3)
        comm.split(0)  # free of charge: not in the trace
        dist.barrier()
        with comm.compute("forward"):
            into.sum()

    result = run(ring, ranks=3)
    trace = result.trace
    assert not trace.virtual
    assert [(m.src, m.dst, m.nbytes, m.label) for m in sorted(trace.transfers)] == [
        (0, 1, 400, "shift"), (1, 2, 400, "shift"), (2, 0, 400, "shift")]
    for m in trace.transfers:
        assert 0 <= max(m.sent_s, m.wanted_s) <= m.start_s <= m.end_s <= result.elapsed_s
    assert [(s.rank, s.kind, s.label) for s in sorted(trace.spans)] == [
        (rank, "compute", "forward") for rank in range(3)]
    assert all(0 <= s.start_s <= s.end_s <= result.elapsed_s for s in trace.spans)
    assert run(ring, ranks=3, trace=False).trace.messages() == 0


def test_a_message_that_nobody_waited_for_is_an_error_that_names_its_line() -> None:
    def forgetful(comm: Comm, cancels: bool) -> float | None:
        if comm.rank == 0:
            work = comm.isend(torch.full((1000,), 7.0), 1)
            if cancels:
                work.cancel()
            return None
        x = torch.empty(1000)
        comm.recv(x, 0)
        return x.sum().item()

    assert run(forgetful, True, ranks=2).values == [None, 7000.0]
    with pytest.raises(UnwaitedWork, match=r"rank 0 .* send to 1 of 4,000 bytes, at test_run.py:"):
        run(forgetful, False, ranks=2)
