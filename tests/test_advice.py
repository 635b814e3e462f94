"""A frequent mistake is answered by one sentence that says what to do instead."""

from __future__ import annotations

import _thread
import pdb  # noqa: T100
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, run, simulate
from dtlab.topology import uniform
from dtlab.widgets import Stepper

NETWORK = uniform(2, 0, 1)


async def waits(comm: Comm) -> None: ...


def barrier(comm: Comm) -> None:
    comm.barrier()


def asks(comm: Comm) -> None:
    input()


def debugs(comm: Comm) -> int:
    pdb.Pdb(readrc=False).set_trace()
    return comm.rank


def outside(comm: Comm) -> None:
    torch.distributed.all_reduce(torch.ones(1))


def connects(comm: Comm) -> None:
    torch.distributed.init_process_group("gloo")


@pytest.mark.parametrize(("call", "advice"), [
    (lambda: simulate(waits, network=NETWORK), "ordinary function.* write `def`"),
    (lambda: run(waits, ranks=2), "ordinary function.* write `def`"),
    (lambda: simulate(barrier, ranks=4), r"no option 'ranks'; .*network=dtlab.topology.uniform\(4"),
    (lambda: simulate(barrier), "network must be a Topology such as"),
    (lambda: run(barrier, network=NETWORK), r"ranks=4; .*simulate\(fn, network="),
    (lambda: run(barrier, rank=4), "no option 'rank'; it has: ranks, backend"),
    (lambda: simulate(barrier, network=NETWORK), r"call dtlab.collectives.barrier\(comm"),
    (lambda: run(barrier, ranks=2), r"call dtlab.collectives.barrier\(comm"),
    (lambda: run(asks, ranks=2), "no keyboard: .* as an argument"),
    (lambda: run(debugs, ranks=2), "raised BdbQuit; .*no keyboard for a debugger: print"),
    (lambda: simulate(debugs, network=NETWORK), "raised BdbQuit; .* for a debugger: print"),
    (lambda: run(connects, ranks=2), "ranks are connected already: use comm"),
    (lambda: simulate(connects, network=NETWORK), "use comm and dtlab.collectives"),
    (lambda: simulate(outside, network=NETWORK), "use comm and dtlab.collectives"),
    (lambda: Stepper(5), "frames are recorded of a function"),
])
def test_a_mistake_is_answered_by_what_to_do(call: Callable[[], Any], advice: str) -> None:
    with pytest.raises(dtlab.DtlabError, match=advice):
        call()


def test_a_stepper_takes_a_function_at_once() -> None:
    def mine(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        return dtlab.collectives.all_reduce(comm, x)

    assert Stepper(mine).frame.title == "all_reduce, mine"


def test_a_figure_of_a_rank_is_not_lost_in_silence() -> None:
    def draws(comm: Comm) -> None:
        from matplotlib import pyplot

        pyplot.plot([1, 2])
        pyplot.show()

    output = run(draws, ranks=1, echo=False).output[0]
    assert "return its numbers, and draw them where you called run" in output


def test_a_cell_on_all_ranks_says_whose_variables_it_sees_and_when_they_are_gone() -> None:
    with dtlab.Session(2, echo=False, timeout=None) as session:
        with pytest.raises(dtlab.RankFailed) as caught:
            session.execute("print(network)")
        assert "define `network` in it, or pass it" in caught.value.__notes__[0]
        threading.Timer(0.5, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt) as interrupted:
            session.execute("while True: pass")
        assert "their variables are gone" in interrupted.value.__notes__[0]
