"""Messages in turn: one after the other in virtual time; over Gloo all have room at once."""

from __future__ import annotations

import pytest
import torch

from dtlab import Comm, Recv, Send, run, simulate
from dtlab.collectives import gather, gatherv
from dtlab.relay import in_turn
from dtlab.topology import uniform

ALPHA, BANDWIDTH = 1e-5, 1e9


def star(comm: Comm, back: bool) -> torch.Tensor:
    """Everyone's rank goes to rank 0, in turn; or rank 0 sends everyone a number of its own."""
    rows = torch.arange(float(comm.size)).repeat_interleave(100).view(comm.size, 100)
    room = torch.zeros(comm.size, 100)
    if comm.rank:
        comm.recv(room[0], 0) if back else comm.send(rows[comm.rank], 0)
    else:
        others = range(1, comm.size)
        in_turn(comm, *(Send(rows[i], i) if back else Recv(room[i], i) for i in others))
    return room[:, 0]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_each_costs_alpha_in_virtual_time(p: int, back: bool) -> None:
    result = simulate(star, back, network=uniform(p, ALPHA, BANDWIDTH))
    assert result.elapsed_s == pytest.approx((p - 1) * (ALPHA + 400 / BANDWIDTH), rel=1e-9)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_processes_and_simulator_agree(p: int, back: bool) -> None:
    there = run(star, back, ranks=p).values
    here = simulate(star, back, network=uniform(p, ALPHA, BANDWIDTH)).values
    assert [x.tolist() for x in there] == [x.tolist() for x in here]


@pytest.mark.parametrize("how", ["linear", "binomial", "uneven"])
def test_over_gloo_a_gather_has_room_for_all_before_the_first_comes(how: str) -> None:
    def work(comm: Comm) -> None:
        x = torch.full((3,), float(comm.rank))
        if comm.rank:  # in reverse order: the root can't wait for one before it looks at the next
            if comm.rank < comm.size - 1:
                comm.recv_object(comm.rank + 1)
            gather(comm, x, algorithm=how) if how != "uneven" else gatherv(comm, x, None)
            if comm.rank > 1:
                comm.send("now you", comm.rank - 1)
        elif how == "uneven":
            into = gatherv(comm, x, [torch.zeros(3) for _ in range(comm.size)])
            assert [row[0].item() for row in into] == [0, 1, 2]
        else:
            assert gather(comm, x, algorithm=how)[:, 0].tolist() == [0, 1, 2]

    messages = [m for m in run(work, ranks=3).trace.transfers if m.label.startswith("gather")]
    first, second = sorted(messages, key=lambda m: m.end_s)
    assert (first.src, second.src) == (2, 1)
    assert second.wanted_s < first.end_s
