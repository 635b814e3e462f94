"""Bad input is answered with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, DtlabError, ShapeMismatch, ps, run, simulate
from dtlab.topology import uniform
from tests.ps.shared import on_workers


def worker_calls(call: Callable[[ps.Node], object], ranks: int = 2, **how: Any) -> Any:
    """Run `call` on the workers after an init of w (3,) and the table e (4, 2)."""
    @on_workers({"w": torch.zeros(3), "e": torch.zeros(4, 2)}, tables=["e"], **how)
    def body(node: ps.Node) -> Any:
        call(node)
        return node.pull(["w"])["w"]

    return simulate(body, network=uniform(ranks, 1e-6, 1e9)).values


NAN = torch.tensor([1.0, float("nan"), 1.0])


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda n: n.pull(["v"]), ConfigError, "unknown key 'v'; init has made: 'w', 'e'"),
    (lambda n: n.push({"v": torch.zeros(3)}), ConfigError, "unknown key 'v'"),
    (lambda n: n.pull("w"), ConfigError, r"pull\(\['w'\]\)"),
    (lambda n: n.push({"w": torch.zeros(4)}), ShapeMismatch, r"\(4,\); init made it with .*\(3,\)"),
    (lambda n: n.push({"w": torch.zeros(3).double()}), ShapeMismatch, "float64"),
    (lambda n: n.push({"w": 1.0}), ConfigError, "takes a tensor, not float"),
    (lambda n: n.pull(["w"], out={"w": torch.zeros(2)}), ShapeMismatch, "pull of 'w'"),
    (lambda n: n.init({"w": torch.zeros(3)}), ConfigError, "there already"),
    (lambda n: n.push({"w": NAN}), ConfigError, "'w' holds NaN"),
    (lambda n: n.push({"w": torch.zeros(3)}, weight=0), ConfigError, "weight"),
    (lambda n: n.pull_rows("w", [0]), ConfigError, "no table"),
    (lambda n: n.pull_rows("e", [4]), ConfigError, "rows 0 to 3"),
    (lambda n: n.pull_rows("e", [[0, 1]]), ConfigError, r"in a shape of \(1, 2\); flatten them"),
    (lambda n: n.push_rows("e", torch.tensor(1), torch.zeros(1, 2)), ConfigError, "one dimension"),
    (lambda n: n.push_rows("e", [0], torch.zeros(1, 3)), ShapeMismatch, "push of 'e'"),
    (lambda n: n.push({"w": torch.zeros(3).to_sparse()}), ConfigError, "no table"),
    (lambda n: (n.init({"steps": torch.arange(3)}), n.push(n.pull(["steps"]))), ConfigError,
     "push of 'steps' with torch.int64"),
    (lambda n: n.init({"v": torch.nested.nested_tensor([torch.zeros(2)])}), ConfigError,
     "a dense tensor, not a nested tensor"),
    (lambda n: n.serve(), ConfigError, "is a worker"),
    (lambda n: n.use_servers([5]), ConfigError, "some of the ranks 0"),
    (lambda n: (n.finish(), n.push({"w": torch.zeros(3)})), ConfigError, "push after finish"),
])
def test_a_call_that_makes_no_sense_is_refused_at_its_line(
    call: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        worker_calls(call)


@pytest.mark.parametrize(("how", "ranks", "says"), [
    ({"servers": 3}, 2, "leaves no worker"),
    ({"servers": 2}, 2, "leaves no worker; .*colocated=True"),
    ({"servers": 0}, 2, "1 or more"),
    ({"servers": 1.5}, 2, "whole number"),
    ({"servers": 1}, 1, "leaves no worker"),
    ({"consistency": ps.BSP}, 2, "the class BSP"),
    ({"consistency": "bsp"}, 2, "got 'bsp'"),
    ({"update": ps.BSP()}, 2, "one of ps.Update"),
    ({"partition": 3}, 2, "ps.Partition"),
    ({"consistency": ps.SoftSync(4)}, 4, "n is 1 to 3"),
    ({"consistency": ps.BackupWorkers(3)}, 4, "at most 2"),
    ({"nan": "ignore"}, 2, '"raise", "drop" or "pass"'),
    ({"active": 4}, 4, "not 4"),
])
def test_a_join_that_makes_no_sense_is_refused(how: Any, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        worker_calls(lambda node: None, ranks, **how)


@pytest.mark.parametrize(("odd", "says"), [
    ({"servers": 2}, r"rank 2 comes with servers=\(0, 1\), rank 0 with \(0,\)"),
    ({"colocated": True}, "rank 2 comes with workers="),
    ({"update": ps.SGD(lr=0.2)}, r"update=SGD\(lr=0.2, .*rank 0 with SGD\(lr=0.1,"),
    ({"consistency": ps.ASP()}, r"consistency=ASP\(\), rank 0 with BSP\(\)"),
])
def test_a_join_with_other_arguments_than_the_other_ranks_is_told(odd: Any, says: str) -> None:
    def body(comm: Comm) -> Any:
        node = ps.join(comm, **(odd if comm.rank == 2 else {}))
        return node.serve() if node.is_server else node.finish()

    with pytest.raises(ConfigError, match=f"join with equal arguments; .*{says}"):
        simulate(body, network=uniform(4, 1e-6, 1e9))


def test_a_rule_that_returns_the_new_weights_changes_none_and_is_told() -> None:
    class Returns(ps.Update):
        def step_(self, w: Any, g: Any, state: Any, count: int) -> Any:
            return w - g

    with pytest.raises(ConfigError, match=r"Returns.step_ returned .*change w in place"):
        worker_calls(lambda n: (n.push({"w": torch.ones(3)}), n.clock()), update=Returns())


def test_a_server_serves_and_nothing_else() -> None:
    def body(comm: Comm) -> None:
        node = ps.join(comm)
        if node.is_server:
            node.pull(["w"])

    with pytest.raises(ConfigError, match=r"rank 0 is a server: it calls serve\(\), not pull\(\)"):
        simulate(body, network=uniform(2, 1e-6, 1e9))


def test_nan_is_left_out_or_let_through_by_choice_and_counted() -> None:
    def call(node: ps.Node) -> None:
        node.push({"w": NAN, "e": torch.ones(4, 2)})
        node.clock()

    server, last = worker_calls(call, nan="drop")
    assert server.nan == 1
    assert last.tolist() == [0, 0, 0]
    server, last = worker_calls(call, nan="pass")
    assert server.nan == 1
    assert last.isnan().tolist() == [False, True, False]


def test_workers_that_make_different_keys_are_told() -> None:
    @on_workers()
    def body(node: ps.Node) -> None:
        node.init({"w": torch.zeros(2 + node.comm.rank)})

    with pytest.raises(ConfigError, match=r"rank \d makes the key 'w' with .* rank \d with"):
        simulate(body, network=uniform(3, 1e-6, 1e9))


def test_a_worker_that_never_finishes_is_named() -> None:
    def body(comm: Comm) -> Any:
        node = ps.join(comm)
        return node.serve() if node.is_server else node.init({"w": torch.zeros(1)})

    with pytest.raises(Deadlock, match="returned"):
        simulate(body, network=uniform(2, 1e-6, 1e9))


@pytest.mark.parametrize("replicas", [0, 1])
def test_nobody_waits_for_a_worker_that_has_finished(replicas: int) -> None:
    @on_workers({"w": torch.zeros(4)}, servers=2 + 2 * replicas, replicas=replicas,
                consistency=ps.ASP(), update=ps.SGD(lr=1.0))
    def body(node: ps.Node) -> list[float] | None:
        if node.comm.rank == node.policy.workers[-1]:  # it finishes while the other waits
            with node.comm.compute("step", seconds=1.0):
                return None
        node.init({"v": torch.zeros(2)})
        node.use_servers([1])
        node.push({"v": -torch.ones(2)})
        return [*node.pull(["v"])["v"].tolist()]

    ranks = 4 + 3 * replicas
    values = simulate(body, network=uniform(ranks, 1e-6, 1e9), trace=False, timeout=30).values
    assert values[-2:] == [[1.0, 1.0], None]


def test_keys_made_after_the_first_worker_has_finished_are_refused() -> None:
    @on_workers({"w": torch.zeros(2)})
    def body(node: ps.Node) -> None:
        if node.comm.rank > 1:
            node.init({"v": torch.zeros(2)})

    with pytest.raises(ConfigError, match="rank 1, whose values count in init, has finished"):
        simulate(body, network=uniform(3, 1e-6, 1e9))


def test_a_mistake_on_processes_is_the_same_mistake() -> None:
    @on_workers({"w": torch.zeros(2)})
    def body(node: ps.Node) -> None:
        node.pull(["v"])

    with pytest.raises(ConfigError, match="unknown key 'v'"):
        run(body, ranks=2)


# ---- tensors without data -----------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [0, 1])
def test_keys_without_data_are_pulled_without_data(replicas: int) -> None:
    @on_workers({"w": torch.empty(9, device="meta"), "emb": torch.empty(4, 3, device="meta")},
                tables=["emb"], servers=2, replicas=replicas, partition=ps.Range())
    def body(node: ps.Node) -> Any:
        keys, buffer = ["w", "emb"], node.buffer(["w"])
        found = [*node.pull(keys).values(), *node.peek(keys).values(), node.pull_rows("emb", [1]),
                 *node.pull(buffer, out=buffer).values()]
        node.push({"w": found[0], "emb": found[1]})
        node.push_rows("emb", [1], found[4])
        node.clock()
        return [(x.device.type, tuple(x.shape)) for x in found]

    values = simulate(body, network=uniform(5, 1e-5, 1e9)).values
    shapes = [(9,), (4, 3), (9,), (4, 3), (1, 3), (9,)]
    assert values[4] == [("meta", shape) for shape in shapes]
    assert values[0].checksum == 0


META, REAL = torch.empty(3, device="meta"), torch.zeros(3)


@pytest.mark.parametrize(("first", "second", "pushed", "says"), [
    (META, META, REAL, "push of 'w' with data; init made it without data"),
    (REAL, REAL, META, "push of 'w' without data .*; init made it with data"),
    (META, REAL, REAL, "rank 2 makes the key 'w' with data, rank 1 without"),
])
def test_data_and_no_data_do_not_mix(first: torch.Tensor, second: torch.Tensor,
                                     pushed: torch.Tensor, says: str) -> None:
    @on_workers()
    def body(node: ps.Node) -> None:
        node.init({"w": first if node.comm.rank == 1 else second})
        node.push({"w": pushed})

    with pytest.raises(DtlabError, match=says):
        simulate(body, network=uniform(3, 1e-5, 1e9))


def test_all_keys_hold_data_or_none_does() -> None:
    def body(comm: Comm) -> Any:
        node = ps.join(comm)
        if node.is_server:
            return node.serve()
        node.init({"a": REAL})
        node.init({"b": META})
        return None

    with pytest.raises(ConfigError, match=r"the key 'b' has no data .*, 'a' has; make all keys of"):
        simulate(body, network=uniform(2, 1e-5, 1e9))
