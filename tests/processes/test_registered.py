"""What a learner registers is there for the ranks, too, by name and for "auto"."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Session, collectives, cost, plots, run, simulate
from dtlab.collectives import algorithm
from dtlab.collectives.registry import IMPLEMENTATIONS
from dtlab.topology import uniform

pytestmark = pytest.mark.usefixtures("registering")


def by_hand(comm: Comm, x: torch.Tensor, op: Any = "sum", times: int = 1) -> torch.Tensor:
    """Everyone sends all to everyone."""
    others = [comm.recv_object(r) if r < comm.rank else None for r in range(comm.rank)]
    for peer in range(comm.size):
        if peer != comm.rank:
            comm.send(x.tolist(), peer)
    others += [comm.recv_object(r) for r in range(comm.rank + 1, comm.size)]
    for other in others:
        x += torch.tensor(other)
    return x.mul_(times)


def cheap(ranks: int, nbytes: int, itemsize: int) -> cost.Form:
    """It costs next to nothing, says its author."""
    return cost.Form(1, 0, 0, [0] * ranks, [0] * ranks)


def dear(ranks: int, nbytes: int, itemsize: int) -> cost.Form:
    """It costs more than any other."""
    return cost.Form(10**9, 10**18, 0, [10**15] * ranks, [10**6] * ranks)


def call(comm: Comm, name: str, **options: Any) -> list[float]:
    """What the all-reduce of rank + 1 gives."""
    x = torch.full((3,), comm.rank + 1.0)
    return collectives.all_reduce(comm, x, algorithm=name, **options).tolist()


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_ranks_know_an_algorithm_that_was_registered_here(p: int) -> None:
    algorithm("all_reduce", "by_hand")(by_hand)
    total = p * (p + 1) / 2
    assert run(call, "by_hand", ranks=p).values == [[total] * 3] * p
    assert run(partial(call, times=2), "by_hand", ranks=p).values == [[2 * total] * 3] * p
    assert simulate(call, "by_hand", network=uniform(p, 1e-6, 1e9)).values == [[total] * 3] * p


def test_an_option_of_it_is_what_it_takes_beyond_the_others() -> None:
    @algorithm("all_reduce", "by_hand")
    def with_names_of_its_own(comm: Comm, vector: torch.Tensor, how: Any, times: int = 1) -> Any:
        return by_hand(comm, vector, how, times)

    network = uniform(2, 1e-6, 1e9)
    assert simulate(partial(call, times=3), "by_hand", network=network).values == [[9.0] * 3] * 2
    with pytest.raises(ConfigError, match="no option 'vector'; it has: times"):
        simulate(partial(call, vector=3), "by_hand", network=network)


def test_ranks_that_stay_get_to_know_it_and_its_new_version() -> None:
    with Session(ranks=2, echo=False) as session:
        with pytest.raises(ConfigError, match="no all_reduce algorithm 'by_hand'"):
            session.run(call, "by_hand")
        algorithm("all_reduce", "by_hand")(by_hand)
        source = "dtlab.collectives.all_reduce(comm, torch.ones(1), algorithm='by_hand').item()"
        assert session.execute(source).values == ["2.0", "2.0"]

        @algorithm("all_reduce", "by_hand")
        def nothing(comm: Comm, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
            return x

        assert session.execute(source).values == ["1.0", "1.0"]
        assert session.run(call, "by_hand").values == [[1.0] * 3, [2.0] * 3]


def test_auto_counts_with_it_on_ranks_too() -> None:
    def labels() -> set[str]:
        return {message.label.split("algorithm=")[1][:7]
                for message in run(call, "auto", ranks=2).trace.transfers}

    algorithm("all_reduce", "by_hand")(by_hand)
    assert labels() != {"by_hand"}
    cost.costs("all_reduce", "by_hand")(cheap)
    assert labels() == {"by_hand"}


def test_what_is_registered_is_heard_at_once() -> None:
    """By auto, and by the pictures, though they keep what they have asked."""
    def taken() -> str:
        trace = simulate(call, "auto", network=uniform(4, 1e-6, 1e9)).trace
        (label,) = {message.label for message in trace.transfers}
        return label.split("algorithm=")[1].split(",")[0]

    def drawn() -> list[float]:
        axes = plots.cost_curves("all_reduce", ["by_hand"], 4, 1e-6, 1e-9).axes[0]
        return list(axes.lines[0].get_ydata())

    before, curves = taken(), []
    cost.costs("all_reduce", "by_hand")(cheap)
    assert taken() == before
    algorithm("all_reduce", "by_hand")(by_hand)
    assert taken() == "by_hand"
    for form, name in [(cheap, "by_hand"), (dear, before), (cheap, "by_hand")]:
        cost.costs("all_reduce", "by_hand")(form)
        curves.append(drawn())
        assert taken() == name
    assert max(curves[0]) < min(curves[1]) > max(curves[2])


@pytest.mark.parametrize("what", ["algorithm", "closed form"])
def test_what_cannot_travel_is_named(what: str) -> None:
    lock = threading.Lock()

    def locked(*args: Any) -> Any:
        with lock:
            return by_hand(*args)

    if what == "algorithm":
        algorithm("all_reduce", "locked")(locked)
    else:
        cost.costs("all_reduce", "locked")(locked)
    with pytest.raises(ConfigError, match="variable `lock` used by `locked` can't be sent"):
        run(lambda comm: comm.rank, ranks=2)


def test_a_mistake_is_told_when_it_is_registered() -> None:
    def forgets_op(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(ConfigError, match=r"all_reduce calls its algorithms as mine\(comm, x, op\),"
                                          r" but 'mine' is defined as forgets_op"):
        algorithm("all_reduce", "mine")(forgets_op)
    with pytest.raises(ConfigError, match="'mine' is defined as 3"):
        algorithm("all_reduce", "mine")(3)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"no collective 'allreduce'.*all_reduce"):
        algorithm("allreduce", "mine")(by_hand)
    with pytest.raises(ConfigError, match="can't be called 'auto'"):
        algorithm("all_reduce", "auto")(by_hand)
    assert "allreduce" not in IMPLEMENTATIONS
    assert "mine" not in IMPLEMENTATIONS["all_reduce"]
    cost.costs("all_reduce", "ring")(lambda ranks, nbytes, itemsize: 1.0)
    with pytest.raises(ConfigError, match=r"form of all_reduce 'ring' must return a .*Form, not 1"):
        cost.time_s("all_reduce", "ring", 4, 400, 1e-6, 1e-9)
