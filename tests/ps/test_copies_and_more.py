"""Servers with copies, and all else at once: keys that move, checkpoints, workers that are lost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dtlab import Comm, RankDied, RankFailed, Result, ps, run, simulate
from dtlab.ps import Checkpoints
from dtlab.ps.replica import Replica
from dtlab.topology import uniform
from tests.ps.shared import on_workers
from tests.ps.test_stalls import GONE, sleepy, star
from tests.simulator.shared import pause

STRONG = [ps.Chain(), ps.Leader(sync=True)]
SERVERS, MASTER, RANKS, STEPS = 4, 4, 7, 5  # two servers with two copies each: ranks 0, 2 and 1, 3
KEYS = [f"k{i}" for i in range(6)]
NETWORK = uniform(RANKS, 1e-5, 1e9)
COPIES: dict[str, Any] = {"servers": SERVERS, "replicas": 1, "lease_s": 0.01}


# ---- keys move ----------------------------------------------------------------------------------


def moving(comm: Comm, rule: ps.Replication, plan: dict[int, Any], **how: Any) -> Any:
    """`plan`: before which step, which servers shall hold the keys."""
    node = ps.join(comm, replication=rule, active=1, update=ps.SGD(0.1, momentum=0.9),
                   **COPIES, **how)
    if node.is_server:
        return node.serve()
    node.init({key: torch.full((5,), float(i), dtype=torch.float64) for i, key in enumerate(KEYS)}
              | {"table": torch.ones(9, 3, dtype=torch.float64)}, tables=["table"])
    for step in range(STEPS):
        if step in plan:
            node.use_servers(plan[step])
            node.peek(KEYS)  # of any copy
        weights = node.pull(KEYS)
        rows = [step, 7, comm.rank]
        table = node.pull_rows("table", rows)
        pause(comm, "step", 0.002)
        node.push({key: (w - comm.rank).sin() for key, w in weights.items()})
        node.push_rows("table", rows, table.cos())
        node.clock()
    last = node.pull([*KEYS, "table"])
    node.finish()
    return [w.tolist() for w in last.values()]


PLAN = {1: 2, 2: [1], 4: [0, 1]}


def moved(rule: ps.Replication, crash: dict[int, int], plan: dict[int, Any] = PLAN) -> Result:
    return simulate(lambda comm: moving(comm, rule, plan), crash=crash, network=NETWORK,
                    timeout=120, trace=False)


@pytest.mark.parametrize("rule", [*STRONG, ps.Leader(sync=False)], ids=repr)
def test_keys_move_between_servers_with_copies(rule: ps.Replication) -> None:
    calm, there_and_back = moved(rule, {}, {}).values, moved(rule, {}).values
    assert there_and_back[5] == there_and_back[6] == calm[5]
    assert calm[1].held_bytes == 0
    for server in range(2):
        assert there_and_back[server].moved > 0
        assert there_and_back[server].checksum == there_and_back[server + 2].checksum


@pytest.fixture(scope="module")
def unharmed() -> Any:
    """The weights at the end, if nothing happens."""
    return moved(ps.Chain(), {}, {}).values[5]


EVENTS = st.none() | st.integers(0, 420)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(SERVERS))
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_copy_may_die_at_every_single_event(rule: ps.Replication, victim: int) -> None:
    @on_workers({"w": torch.arange(6.0)}, **COPIES, replication=rule, active=1,
                partition=ps.Range())
    def body(node: ps.Node) -> Any:
        for servers in (2, 1):
            node.use_servers(servers)
        return node.pull(["w"])["w"].tolist()

    events, values = 0, [None] * 6
    while values[victim] is None:
        values = simulate(body, network=uniform(6, 1e-5, 1e9), crash={victim: events},
                          timeout=60, trace=False).values
        assert values[5] == [0, 1, 2, 3, 4, 5], events
        events += 1
    assert events > 20


@given(rule=st.sampled_from(STRONG), plan=st.sampled_from([PLAN, {0: [1], 1: [0], 2: 2}]),
       one=st.sampled_from([0, 2]), other=st.sampled_from([1, 3]), events=st.tuples(EVENTS, EVENTS))
def test_whichever_copies_die_at_whatever_moment_every_key_arrives(
    rule: ps.Replication, plan: dict[int, Any], one: int, other: int,
    events: tuple[int | None, int | None], unharmed: Any,
) -> None:
    crash = {rank: at for rank, at in zip((one, other), events, strict=True) if at is not None}
    result = moved(rule, crash, plan)
    assert result.values[5] == result.values[6] == unharmed
    assert result.values[MASTER].overlaps() == []


@example(rule=STRONG[0], seed=245, event=237, leases=5)  # a pull from before keys moved, late
@example(rule=STRONG[1], seed=355, event=361, leases=5)
@given(rule=st.sampled_from(STRONG), seed=st.integers(0, 1 << 20), event=EVENTS,
       leases=st.sampled_from([1, 2.5, 5]))
def test_some_sleep_one_crashes_some_come_back_and_every_key_arrives(
    rule: ps.Replication, seed: int, event: int | None, leases: float, unharmed: Any
) -> None:
    crash = {seed % SERVERS: event} if event is not None else {}
    try:
        with sleepy(seed, 0.01, leases, range(RANKS)):
            result = simulate(lambda comm: moving(comm, rule, PLAN, grace_s=20.0), crash=crash,
                              network=star(seed, RANKS), timeout=120, trace=False)
    except RankFailed as failed:  # the other copy was given up at that time, while it slept
        told = str(failed)
    else:
        told = GONE
        assert result.values[5] == result.values[6] == unharmed
    assert GONE in told


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_what_was_asked_before_keys_move_is_answered_before(
    rule: ps.Replication, victim: int
) -> None:
    """Keys are named by their places, and these change; who has no answer asks again."""
    @on_workers({key: torch.arange(4.0) for key in KEYS}, **COPIES, replication=rule,
                update=ps.SGD(1.0))
    def body(node: ps.Node) -> Any:
        early = node.pull_async(KEYS)
        node.push_async({key: -torch.ones(4) for key in KEYS})
        node.use_servers([1])
        node.clock()
        last = node.pull(KEYS)
        return [[w.tolist() for w in weights.values()] for weights in (early.wait(), last)]

    for event in range(10, 60):
        values = simulate(body, network=NETWORK, crash={victim: event}, timeout=60,
                          trace=False).values[5:]
        assert values == [[[[0.0, 1.0, 2.0, 3.0]] * 6, [[1.0, 2.0, 3.0, 4.0]] * 6]] * 2


class Sent(list[Any]):
    """An endpoint that keeps what a copy sends."""

    def send(self, *message: Any) -> None:
        self.append(message)


def with_two_copies(what: Any) -> Any:
    """`what(replica, another of the same server, what they sent)`."""
    def body(comm: Comm) -> Any:
        policy, sent = ps.join(comm, **COPIES).policy, Sent()
        copies = (Replica(comm, sent, policy, 0, ps.Chain()) for _ in range(2))  # type: ignore[arg-type]
        return what(*copies, sent)

    return simulate(body, network=NETWORK).values[2]


def test_a_copy_that_comes_back_is_told_all_that_matters() -> None:
    def brought_up_to_date(one: Replica, other: Replica, sent: Sent) -> Any:
        one.send(1, ("shards", 1, 0, []), [])
        one.server.lost, one.server.resumed, one.server.found = [6], 8, ["of late keys"]
        one.adopt(2, 7)
        other.install(*sent[-1][1][2:])
        return other.transfers.sent, other.server.lost, other.server.resumed, other.server.found

    assert with_two_copies(brought_up_to_date) == (
        {1: (("shards", 1, 0, []), [])}, [6], 8, ["of late keys"])


def test_a_copy_shows_nothing_until_its_keys_have_moved_as_well() -> None:
    def looked_at(one: Replica, other: Replica, sent: Sent) -> Any:
        answers = []
        for moves in range(3):
            one.server.migration.moves = moves
            if moves != 1:
                one.request(6, ("peek", 3, (), (), 1), [])
            one._answer_peeks()
            answers.append(len(sent))
        return answers

    assert with_two_copies(looked_at) == [0, 1, 1]


def test_a_pull_of_a_worker_that_is_lost_is_never_answered() -> None:
    """With a synchronous leader, a worker may die while its pull waits for followers."""
    def carried_out(one: Replica, other: Replica, sent: Sent) -> Any:
        for request in (("clock", 1), ("pull", 2, (), ()), ("lose", 3)):
            one.server.handle(6, request, [])
        one.server.handle(5, ("clock", 1), [])  # for which the pull has waited
        return one.server.lost, one.server.clocks.closed

    assert with_two_copies(carried_out) == ([6], 1)


# ---- checkpoints --------------------------------------------------------------------------------


def saving(comm: Comm, folder: Path, steps: int, rule: ps.Replication) -> Any:
    """`steps` iterations in all, from the last checkpoint on; half of the keys are made late."""
    node = ps.join(comm, **COPIES, replication=rule, update=ps.Adam(lr=0.1), partition=ps.Range(),
                  checkpoints=Checkpoints(folder, every=4))
    if node.is_server:
        return node.serve()
    begin = node.init({"w": torch.arange(7, dtype=torch.float64)})
    node.init({"v": torch.ones(4, dtype=torch.float64)})
    for step in range(begin, steps):
        weights = node.pull(["w", "v"])
        pause(comm, "step", 0.003)
        node.push({key: (w + step).sin() for key, w in weights.items()})
        node.clock()
    last = node.pull(["w", "v"])
    node.finish()
    return begin, [w.tolist() for w in last.values()]


def saved(folder: Path, steps: int, rule: ps.Replication = STRONG[0], **how: Any) -> Any:
    return simulate(lambda comm: saving(comm, folder, steps, rule), network=NETWORK, timeout=60,
                    trace=False, **how).values[-1]


@cache
def calm(steps: int, rule: ps.Replication = STRONG[0]) -> Any:
    """The last weights if nothing happens."""
    with TemporaryDirectory() as folder:
        return saved(Path(folder), steps, rule)[1]


@pytest.mark.parametrize("rule", [*STRONG, ps.Leader(sync=False)], ids=repr)
def test_servers_with_copies_go_on_from_a_checkpoint(
    tmp_path: Path, rule: ps.Replication
) -> None:
    assert saved(tmp_path / "cut", 10, rule)[0] == 0
    assert saved(tmp_path / "cut", 12, rule) == (8, calm(12, rule))
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == [
        f"server{server}-clock{clock:08d}.ckpt" for server in range(2) for clock in (8, 12)]


def test_one_copy_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save",
                        lambda self, *what: (written.append(what[:2]), save(self, *what)))
    saved(tmp_path, 12)
    assert sorted(written) == [(server, clock) for server in range(2) for clock in (4, 8, 12)]


def test_two_copies_that_both_write_leave_a_sound_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wakes and writes on while the other, which took its place, writes and tidies up."""
    keep, other_too = Checkpoints(tmp_path), iter([True])
    for clock in (1, 2):
        keep.save(0, clock, "old")
    replace = os.replace

    def slow(*paths: Path) -> None:
        if next(other_too, False):
            keep.save(0, 3, "new", copy=2)
        replace(*paths)

    unlink = Path.unlink
    monkeypatch.setattr(os, "replace", slow)
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (unlink(path, **how),
                                                             unlink(path, **how)))
    keep.save(0, 3, "new", copy=0)
    assert keep.load(0, 3) == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"server0-clock{clock:08d}.ckpt" for clock in (2, 3)]


@given(rule=st.sampled_from(STRONG), victim=st.integers(0, 3), event=st.integers(0, 300),
       again=st.integers(0, 300))
def test_copies_may_die_before_and_after_it_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, rule: ps.Replication, victim: int, event: int,
    again: int
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    saved(folder / "cut", 10, rule, crash={victim: event})
    begin, last = saved(folder / "cut", 12, rule, crash={3 - victim: again})
    assert begin in (4, 8)  # a copy that died may have had to write the newer one
    assert last == calm(12, rule)


@given(seed=st.integers(0, 1 << 20), leases=st.sampled_from([2.5, 5]))
@example(seed=0, leases=2.5)
def test_a_copy_that_comes_back_knows_what_was_resumed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, leases: float
) -> None:
    """It has seen nothing of it, and writes the next checkpoint under the right clock."""
    folder = tmp_path_factory.mktemp("saved")
    saved(folder / "cut", 9)
    with sleepy(seed, 0.02, leases, range(SERVERS)), suppress(RankFailed):  # may be too much
        assert saved(folder / "cut", 20)[0] == 8
    begin, last = saved(folder / "cut", 24)
    assert begin in (8, 12, 16, 20)
    assert last == calm(24)


def test_keys_that_are_made_late_count_no_clock_twice(tmp_path: Path) -> None:
    """Without copies, too: what this run has written itself is nothing to go on from."""
    @on_workers(checkpoints=Checkpoints(tmp_path, every=2))
    def body(node: ps.Node) -> Any:
        begins = [node.init({"w": torch.zeros(1)})]
        for step in range(4):
            if step == 3:
                begins.append(node.init({"v": torch.zeros(1)}))
            node.pull(["w"])
            node.clock()
        return begins

    assert simulate(body, network=uniform(2, 1e-5, 1e9)).values[1] == [0, 0]
    assert Checkpoints(tmp_path).clocks(0) == {2, 4}


# ---- workers that are lost ----------------------------------------------------------------------


def count(node: ps.Node, clocks: int = 10) -> list[float]:
    """Under BSP each clock adds one to the weights, from any worker; keys move halfway."""
    node.init({key: torch.zeros(1) for key in KEYS})
    for clock in range(clocks):
        if clock == clocks // 2:
            node.use_servers(1)
        node.pull(KEYS)
        pause(node.comm, "step", 0.003)
        node.push({key: -torch.ones(1) for key in KEYS})
        node.clock()
    return [w.item() for w in node.pull(KEYS).values()]


def counting(servers: int, rule: ps.Replication, lost_worker: str,
             patience_s: float | None = 0.05) -> Any:
    how = {"servers": servers, "replicas": 1, "replication": rule, "update": ps.SGD(lr=1.0),
           "lease_s": 0.01, "grace_s": 20.0, "patience_s": patience_s, "lost_worker": lost_worker}
    return on_workers(**how)(count)


def counted(rule: ps.Replication, crash: dict[int, int], lost_worker: str = "go on",
            closes: bool = False) -> Result:
    """closes: a crash breaks connections, as that of a process does, so that nobody has to be
    patient."""
    return simulate(counting(SERVERS, rule, lost_worker, None if closes else 0.05), crash=crash,
                    detect_s=0.001 if closes else None, network=uniform(8, 1e-5, 1e9), timeout=60,
                    trace=False)


@example(rule=STRONG[0], event=160, victim=0, events=None, closes=False)  # between its messages
@example(rule=STRONG[1], event=213, victim=0, events=None, closes=False)  # between its last ones
@given(rule=st.sampled_from(STRONG), event=st.integers(0, 250), victim=st.integers(0, 3),
       events=EVENTS, closes=st.booleans())
def test_training_goes_on_without_a_worker_and_a_copy(
    rule: ps.Replication, event: int, victim: int, events: int | None, closes: bool
) -> None:
    crash = {7: event} | ({victim: events} if events is not None else {})
    result = counted(rule, crash, closes=closes)
    assert result.values[5] == result.values[6] == [10.0] * 6
    lost = {tuple(copy.lost_workers) for copy in result.values[:SERVERS] if copy is not None}
    if event < 150:
        assert lost == {(7,)}
    assert lost <= {(7,), ()}  # it may die when it has finished, or finished with one server


@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_or_the_run_ends_and_says_who_is_missing(rule: ps.Replication) -> None:
    with pytest.raises(RankDied, match=r"worker 7 has died or been silent for 0.05 s, after \d"):
        counted(rule, {7: 60}, "stop")
    with pytest.raises(RankDied, match=r"worker 7 has died, after \d clocks; join"):
        counted(rule, {7: 60}, "stop", closes=True)


@given(rule=st.sampled_from(STRONG), seed=st.integers(0, 1 << 20), leases=st.sampled_from([5, 15]))
def test_nobody_is_lost_because_servers_sleep(
    rule: ps.Replication, seed: int, leases: float
) -> None:
    """What workers have written meanwhile lies there unread."""
    try:
        with sleepy(seed, 0.02, leases, range(3)):
            result = simulate(counting(2, rule, "go on"), trace=False,
                              network=uniform(5, 1e-5, 1e9), timeout=60)
    except RankFailed as failed:  # all copies were given up at the same time
        told = str(failed)
    else:
        told = GONE
        assert result.values[3] == result.values[4] == [10.0] * 6
        assert all(copy.lost_workers == [] for copy in result.values[:2])
    assert GONE in told or "lost touch" in told


@pytest.mark.parametrize("patience_s", [None, 0.05])
def test_without_copies_a_worker_may_be_lost_and_a_server_may_not(patience_s: float | None) -> None:
    body = on_workers(servers=2, update=ps.SGD(lr=1.0), patience_s=patience_s,
                      lost_worker="go on")(count)

    def values(crash: dict[int, int]) -> list[Any]:
        return simulate(body, network=uniform(5, 1e-5, 1e9), crash=crash, detect_s=0.001,
                        timeout=60, trace=False).values

    *servers, three, four, none = values({4: 60})
    assert three == four == [10.0] * 6
    assert none is None
    assert [server.lost_workers for server in servers] == [[4], [4]]
    with pytest.raises(RankDied):
        values({1: 60})


def test_nor_without_copies() -> None:
    body = on_workers(patience_s=0.05, lost_worker="go on")(partial(count, clocks=20))
    for seed in range(5):
        with sleepy(seed, 0.1, 15, range(1)):
            server = simulate(body, network=uniform(3, 1e-5, 1e9), trace=False).values[0]
        assert server.lost_workers == []


@pytest.mark.parametrize("event", range(8, 60, 3))
def test_who_waits_for_one_server_is_not_lost_for_another(event: int) -> None:
    """Worker 5 dies between its messages to two servers; one of them answers the others at once."""
    body = on_workers(servers=2, update=ps.SGD(lr=1.0), patience_s=0.05,
                      lost_worker="go on")(partial(count, clocks=5))
    values = simulate(body, network=uniform(6, 1e-5, 1e9), crash={5: event}, trace=False).values
    assert values[3] == values[4] == [5.0] * 6
    assert all(server.lost_workers == [5] for server in values[:2])


def test_a_worker_and_a_copy_are_killed_on_processes_while_keys_move() -> None:
    def body(comm: Comm) -> Any:
        pids = comm._all_gather_objects(os.getpid())
        node = ps.join(comm, servers=SERVERS, replicas=1, active=1, update=ps.SGD(lr=1.0),
                       lease_s=1.0, grace_s=30.0, patience_s=10.0, lost_worker="go on")
        if node.is_server:
            return node.serve()
        node.init({key: torch.zeros(9) for key in KEYS})
        for step in range(10):
            node.pull(KEYS)
            if comm.rank == 7 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if comm.rank == 6 and step == 4:
                os.kill(pids[0], signal.SIGKILL)
            node.push({key: -torch.ones(9) for key in KEYS})
            node.clock()
            if step == 5:
                node.use_servers(2)
        last = node.pull(KEYS)
        node.finish()
        return [(w.min().item(), w.max().item()) for w in last.values()]

    values = run(body, ranks=8, may_die=[0, 7], timeout=60).values
    assert values[5] == values[6] == [(10.0, 10.0)] * 6
    assert values[2].lost_workers == [7]
    assert values[2].moved > 0
