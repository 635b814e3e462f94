"""Each update rule does what its equation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, ps, simulate
from dtlab.topology import uniform
from tests.ps.shared import on_workers


def tensors(count: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(5, generator=numbers, dtype=torch.float64) for _ in range(count)]


def test_staleness_divides_the_step() -> None:
    w, g = tensors(2)
    rule, found = ps.StalenessAwareSGD(lr=0.3), w.clone()
    rule.step_(found, rule.prepare(g, found, {}, 1, staleness=4), {}, 1)
    torch.testing.assert_close(found, w - 0.3 / 4 * g)
    for staleness in (0, 1):
        assert torch.equal(rule.prepare(g, w, {}, 1, staleness), g)


def test_delay_is_compensated_towards_where_the_weights_are_now() -> None:
    w_old, w, g = tensors(3)
    rule, state, found = ps.DCASGD(lr=0.1, lam=0.5), {}, w.clone()
    rule.pulled(w_old, state, worker=2)
    rule.step_(found, rule.prepare(g, found, state, 2, 3), state, 1)
    torch.testing.assert_close(found, w - 0.1 * (g + 0.5 * g * g * (w - w_old)))


def test_each_worker_has_a_backup_of_its_own() -> None:
    first, second, w, g = tensors(4)
    rule, state = ps.DCASGD(lr=0.1, lam=0.5), {}
    rule.pulled(first, state, worker=1)
    rule.pulled(second, state, worker=2)
    found = rule.prepare(g, w, state, 1, 1)
    torch.testing.assert_close(found, g + 0.5 * g * g * (w - first))


def test_adaptive_compensation_shrinks_with_the_mean_square() -> None:
    w_old, w, g = tensors(3)
    rule, state = ps.DCASGD(lr=0.1, lam=2.0, adaptive=True, decay=0.9, eps=1e-7), {}
    rule.pulled(w_old, state, worker=0)
    mean_square = torch.zeros(5, dtype=torch.float64)
    for _ in range(3):
        found = rule.prepare(g, w, state, 0, 1)
        mean_square = 0.9 * mean_square + 0.1 * g * g
    lam = 2.0 / (mean_square + 1e-7).sqrt()
    torch.testing.assert_close(found, g + lam * g * g * (w - w_old))


def test_elastic_averaging_pulls_the_centre_to_the_workers_and_them_to_it() -> None:
    center, g1, g2, x1, x2 = tensors(5)
    rule = ps.EASGD(lr=0.1, alpha=0.2)

    @on_workers({"x": center}, update=rule)
    def body(node: ps.Node) -> Any:
        x, g = ((x1, g1), (x2, g2))[node.comm.rank - 1]
        there = node.pull(["x"])["x"]
        node.push({"x": x})
        rule.local_(x, g, there)
        node.clock()
        return x, node.pull(["x"])["x"]

    (found1, after), (found2, _) = simulate(body, network=uniform(3, 1e-6, 1e9)).values[1:]
    torch.testing.assert_close(found1, x1 - 0.1 * g1 - 0.2 * (x1 - center))
    torch.testing.assert_close(found2, x2 - 0.1 * g2 - 0.2 * (x2 - center))
    torch.testing.assert_close(after, center + 0.2 * ((x1 - center) + (x2 - center)))


def test_federated_averaging_weighs_by_examples() -> None:
    w1, w2, w3 = tensors(3)

    @on_workers({"w": torch.zeros(5, dtype=torch.float64)}, update=ps.FedAvg())
    def body(node: ps.Node) -> Any:
        node.push({"w": (w1, w2, w3)[node.comm.rank - 1]}, weight=10 * node.comm.rank)
        node.clock()
        return node.pull(["w"])["w"]

    for last in simulate(body, network=uniform(4, 1e-6, 1e9)).values[1:]:
        torch.testing.assert_close(last, (10 * w1 + 20 * w2 + 30 * w3) / 60)


def test_staleness_counts_the_updates_since_the_worker_pulled() -> None:
    """Two workers pull, then push one after the other: the second gradient has missed one."""
    @on_workers({"w": torch.zeros(1)}, consistency=ps.ASP(), update=ps.StalenessAwareSGD(lr=1.0))
    def body(node: ps.Node) -> None:
        for _ in range(3):
            node.pull(["w"])
            with node.comm.compute("step", seconds=0.01 if node.comm.rank == 1 else 0.1):
                pass
            node.push({"w": torch.ones(1)})
            node.clock()

    server = simulate(body, network=uniform(3, 1e-6, 1e9)).values[0]
    assert dict(server.staleness) == {0: 5, 3: 1}


@pytest.mark.parametrize(("make", "says"), [
    (lambda: ps.SGD(lr=-1), "lr"),
    (lambda: ps.SGD(lr=float("nan")), "lr"),
    (lambda: ps.SGD(lr=0.1, momentum="0.9"), "momentum"),
    (lambda: ps.Adam(betas=(-1, 0.9)), "beta1"),
    (lambda: ps.EASGD(alpha=float("inf")), "alpha"),
    (lambda: ps.DCASGD(0.1, -2), "lam"),
])
def test_numbers_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("partition", [ps.Range(), ps.Hash()])
def test_complex_numbers_are_trained_as_torch_trains_them(partition: ps.Partition) -> None:
    w, *grads = (torch.complex(a, b).view(5, 1) for a, b in zip(
        tensors(8)[:4], tensors(8)[4:], strict=True))

    @on_workers({"w": w, "table": w}, tables=["table"], servers=2, active=1, partition=partition,
                update=ps.Adam(lr=0.1))
    def body(node: ps.Node) -> Any:
        for step, g in enumerate(grads):
            if step == 1:
                node.use_servers(2)
            node.push({"w": g.conj(), "table": g.conj()})
            node.clock()
        return node.pull(["w", "table"])

    alone = w.clone().requires_grad_()
    optimizer = torch.optim.Adam([alone], lr=0.1)
    for g in grads:
        alone.grad = g.conj().resolve_conj()
        optimizer.step()
    for found in simulate(body, network=uniform(3, 1e-6, 1e9)).values[2].values():
        torch.testing.assert_close(found, alone.detach())


@pytest.mark.parametrize("weight", [1.0, 1000.0, 1e-8])
def test_a_mean_of_halves_is_right_where_their_sum_is_none(weight: float) -> None:
    @on_workers({"w": torch.zeros(2, dtype=torch.float16)}, update=ps.FedAvg())
    def body(node: ps.Node) -> Any:
        value = 30000.0 + 64 * node.comm.rank
        node.push({"w": torch.full((2,), value, dtype=torch.float16)}, weight)
        node.clock()
        return node.pull(["w"])["w"].tolist()

    assert simulate(body, network=uniform(4, 1e-6, 1e9)).values[1] == [30128.0] * 2


@pytest.mark.parametrize("order", [(1.0, 3.0), (3.0, 1.0)])
def test_pushes_of_unequal_weights_within_a_clock_may_come_in_any_order(
    order: tuple[float, float]
) -> None:
    @on_workers({"w": torch.zeros(())}, update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> Any:
        for value in order:
            node.push({"w": torch.tensor(value)}, weight=value)
        node.clock()
        return node.pull(["w"])["w"].item()

    # Two workers, each with (1·1 + 3·3) in all and a mean weight of 2.
    assert simulate(body, network=uniform(3, 1e-6, 1e9)).values[1:] == [-20 / 4] * 2


class Remembers(ps.Update):
    """Keeps `what(w)` beside the weights."""

    def __init__(self, what: Callable[[torch.Tensor], Any]):
        object.__setattr__(self, "what", what)

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: dict[Any, Any], count: int) -> None:
        state["kept"] = self.what(w)


@pytest.mark.parametrize("what", [lambda w: [w], lambda w: torch.tensor(1),
                                  lambda w: torch.optim.SGD([w.clone().requires_grad_()])])
def test_a_state_that_servers_could_not_cut_is_refused(what: Callable[[torch.Tensor], Any]) -> None:
    def fn(comm: Comm) -> None:
        node = ps.join(comm, update=Remembers(what))
        if not node.is_server:
            node.init({"w": torch.ones(2)})
            node.push({"w": torch.ones(2)})
            node.clock()
            node.finish()
        else:
            node.serve()

    with pytest.raises(ConfigError, match="servers cut and move keys"):
        simulate(fn, network=uniform(2, 1e-6, 1e9))
