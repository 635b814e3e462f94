"""Ranks die at any moment, and training goes on as if they had not: restart, shrink, replicas."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtlab
from dtlab import Comm, RankDied
from dtlab.collectives import barrier
from dtlab.parallel import (
    LAMB,
    BatchSampler,
    DataParallel,
    MemoryCheckpoint,
    Replicas,
    full_state_dict,
    load,
    save,
    zero,
)
from tests.parallel.training import (
    MODELS,
    batch_of,
    difference,
    loss_of,
    one_device,
    one_step,
    shard_of,
    wrapped,
)

STEPS, RANKS = 6, 4
NETWORK = dtlab.topology.uniform(RANKS, 1e-5, 1e9)


def die_once(comm: Comm, folder: Path, kills: dict[int, float]) -> None:
    """The first process that is one of these ranks of the run is killed so many seconds from now.
    """
    rank = comm.global_ranks[comm.rank]
    mark = folder / f"killed {rank}"
    if rank in kills and not mark.exists():
        mark.touch()
        Timer(kills[rank], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


# ---- restart ------------------------------------------------------------------------------------


def noisy(comm: Comm, folder: Path, kills: dict[int, float], wait: bool = True) -> Any:
    """A training whose dropout draws from each rank's own random numbers."""
    die_once(comm, folder, kills)
    torch.manual_seed(comm.rank)
    module = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.3), nn.Linear(16, 10)).double()
    model, optimizer = zero(module, comm, 2, torch.optim.Adam, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    sampler = BatchSampler(60, 13, comm, seed=3)
    begun = (folder / "c" / "latest").exists()
    extra = load(folder / "c", model, optimizer) if begun else {"step": 0}
    loaded_s = comm.now()
    if begun:
        scheduler.load_state_dict(extra["scheduler"])
        sampler.load_state_dict(extra["sampler"])
    step, saving = extra["step"], None
    samples, labels = batch_of("mlp", 0, size=60)
    while step < STEPS:
        sampler.set_epoch(sampler.epoch + (sampler.state_dict()["seen"] == 60))
        for batch in sampler:
            optimizer.zero_grad()
            model.backward(loss_of(model, (samples[batch], labels[batch])), len(batch))
            optimizer.step()
            scheduler.step()
            step += 1
            saving = save(folder / "c", model, optimizer, {
                "step": step, "scheduler": scheduler.state_dict(),
                "sampler": sampler.state_dict()}, wait=wait)
            if step == STEPS:
                break
    if saving:
        saving.wait()
    return full_state_dict(model), step, loaded_s


def test_restarts_are_counted_and_errors_of_use_are_not_repeated(tmp_path: Path) -> None:
    def fails(comm: Comm, wrong: bool) -> int:
        (tmp_path / f"{os.getpid()}").touch()
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if wrong:
            raise dtlab.ConfigError("no such thing")
        if count < 2:
            raise ValueError(count)
        return count

    assert dtlab.run(fails, False, ranks=2, max_restarts=2, echo=False).values == [2, 2]
    with pytest.raises(dtlab.RankFailed, match="ValueError: 1"):
        dtlab.run(fails, False, ranks=2, max_restarts=1, echo=False)
    before = len(list(tmp_path.iterdir()))
    with pytest.raises(dtlab.ConfigError, match="no such thing"):
        dtlab.run(fails, True, ranks=1, max_restarts=3, echo=False)
    assert len(list(tmp_path.iterdir())) == before + 1


# ---- shrink -------------------------------------------------------------------------------------


def shrinking(comm: Comm, stage: int, folder: Path | None = None,
              kills: dict[int, float] | None = None) -> Any:
    """A training whose survivors share out what the dead had."""
    if folder is not None:
        die_once(comm, folder, kills or {})
    memory, longest_s = MemoryCheckpoint(), 0.0
    while True:
        begun_s = comm.now()
        try:
            model, optimizer = wrapped(comm, stage)
            step = memory.load(model, optimizer) or 0
            longest_s = max(longest_s, comm.now() - begun_s) if step else 0.0
            while step < STEPS:
                begun_s = comm.now()
                one_step(model, optimizer, step)
                step += 1
                memory.save(model, optimizer, step)
                if folder is not None:
                    time.sleep(0.05)
            return full_state_dict(model), comm.size, longest_s
        except RankDied:
            comm = comm.shrink()


def survivors(stage: int, ranks: int, crash: dict[int, int]) -> int:
    """How many they are at the end; what they have is what one device has."""
    values = dtlab.simulate(shrinking, stage, network=dtlab.topology.uniform(ranks, 1e-5, 1e9),
                            crash=crash, detect_s=1e-3, trace=False).values
    found = [value for value in values if value is not None]
    for state, size, _ in found:
        assert difference(state, one_device("mlp", "adam", STEPS)) < 1e-10
        assert size in (len(found), ranks)  # the last events are after the end
    return len(found)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_survivors_of_any_death_equal_one_device(stage: int) -> None:
    sizes = {survivors(stage, RANKS, {event % RANKS: event})
             for event in range(0, 700, 67 - 11 * stage)}
    assert sizes == {RANKS - 1, RANKS}


def test_a_death_within_a_copy_leaves_the_copies_before() -> None:
    """Some ranks have their neighbour's part of the new checkpoint by then, others have not."""
    for event in range(33, 38):
        assert survivors(1, 6, {3: event}) == 5


def test_two_may_die_but_not_two_neighbours_at_once() -> None:
    for crash in ({1: 60, 3: 60}, {1: 40, 2: 70}, {0: 60, 4: 65}):
        assert survivors(2, 5, crash) == 3
    with pytest.raises(dtlab.ConfigError, match=r"the parts of rank \d died with them"):
        survivors(2, 5, {1: 60, 2: 60})


def test_parts_of_two_attempts_at_a_checkpoint_are_never_mixed() -> None:
    """Rank 5 dies within a save, which some have completed; comes back; then rank 2 dies while all
    save the older one anew, under the same number."""

    def trained(comm: Comm) -> None:
        memory = MemoryCheckpoint()
        while True:
            try:
                model = DataParallel(nn.Linear(6, 1, bias=False), comm)
                extra = memory.load(model) or {"steps": []}
                if steps := extra["steps"]:
                    assert model.module.weight.tolist() == [[float(steps[-1])] * 6]
                    assert steps == [*range(1, len(steps) + 1)]
                while len(steps) < 8:
                    steps.append(len(steps) + 1)
                    model.module.weight.data.fill_(steps[-1])
                    memory.save(model, None, extra)
                    barrier(comm)
                return
            except RankDied:
                comm = comm.shrink()

    for first in range(5, 10):
        for second in range(first + 16, first + 19):
            dtlab.simulate(trained, network=dtlab.topology.uniform(6, 1e-5, 1e9), trace=False,
                           crash={5: first, 2: second}, detect_s=1e-3, restart_s=0.0)


def test_what_the_caller_does_with_extra_does_not_change_the_checkpoint() -> None:
    def body(comm: Comm) -> Any:
        memory, model = MemoryCheckpoint(), DataParallel(nn.Linear(2, 1), comm)
        memory.save(model, None, {"steps": [1]})
        memory.load(model)["steps"].append(2)  # and saves it anew; let a death undo that
        memory._parts = {key: part for key, part in memory._parts.items() if key[0] == 1}
        return memory.load(model)

    values = dtlab.simulate(body, network=dtlab.topology.uniform(2, 1e-5, 1e9)).values
    assert values == [{"steps": [1]}] * 2


# ---- replicas -----------------------------------------------------------------------------------


def replicated(comm: Comm, ranks: int, folder: Path | None = None,
               kills: dict[int, float] | None = None, stage: int = 3) -> Any:
    """Groups of `ranks`, of which each trains on its own quarter or half of every batch."""
    if folder is not None:
        die_once(comm, folder, kills or {})
    groups = RANKS // ranks
    longest_s = 0.0

    def build(group: Comm) -> Any:
        return wrapped(group, stage if ranks > 1 else 0)

    def backward(model: Any, step: int, group: int) -> int:
        if folder is not None:
            time.sleep(0.01)
        with comm.compute("backward", 1.0):
            pass
        shard = shard_of(batch_of("mlp", step), group, groups)
        mine = shard_of(shard, model.comm.rank, model.comm.size)
        return int(model.backward(loss_of(model, mine), len(mine[-1])))

    replicas = Replicas(comm, ranks, build)
    while replicas.steps < STEPS:
        begun_s = comm.now()
        replicas.step(backward)
        longest_s = max(longest_s, comm.now() - begun_s)
    if replicas.model is None:
        return None
    try:
        return full_state_dict(replicas.model), replicas.counted, longest_s
    except RankDied:  # the other rank of its group, after the last step
        return None


def one_device_of(counted: dict[int, list[int]], groups: int) -> dict[str, Tensor]:
    """Training that leaves out the samples of groups that were not there."""
    module = MODELS["mlp"](torch.float64)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for step in range(STEPS):
        parts = [shard_of(batch_of("mlp", step), group, groups) for group in counted[step]]
        optimizer.zero_grad()
        loss_of(module, tuple(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def check_replicas(values: list[Any], ranks: int) -> bool:
    """Were there steps without one of the groups?"""
    whole = [value for value in values if value is not None]
    counted: dict[int, list[int]] = {}
    for _, seen, _ in whole:
        counted |= seen
    assert whole
    # The last step may be another one, taken when some had returned.
    expected = [one_device_of(counted | seen, RANKS // ranks) for _, seen, _ in whole]
    for state, *_ in whole:
        assert min(difference(state, each) for each in expected) < 1e-10
    return any(len(groups) < RANKS // ranks for groups in counted.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lost_group_is_left_out_and_comes_back(ranks: int) -> None:
    missing, back = 0, 0
    crashes = [(event % RANKS, event) for event in range(3, 120, 13)]
    crashes += [(0, 17), (1, 19), (2, 30)]  # of two ranks a group: some have taken the step
    for victim, event in crashes:
        values = dtlab.simulate(replicated, ranks, network=NETWORK, crash={victim: event},
                                detect_s=0.1, restart_s=2.5, trace=False).values
        missing += check_replicas(values, ranks)
        back += values[victim] is not None
    assert missing > 3
    assert back > 3


@pytest.mark.parametrize("restart_s", [2.5, None])
def test_a_death_while_zero_hands_out_parameters_voids_no_step(restart_s: float | None) -> None:
    """All had the average: whose group has ended has stepped its part, too, once. A death in the
    last step keeps nobody waiting for those that have returned."""
    for event in (15, 16, 26, 27, 70, 71, 72):
        values = dtlab.simulate(replicated, 2, None, None, 1, network=NETWORK, crash={0: event},
                                detect_s=1e-5, restart_s=restart_s, trace=False, timeout=60).values
        check_replicas(values, 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("cuts", [(0, 2, 2, 6), (0, 6, 6, 6), (0, 1, 3, 6)])
def test_groups_without_samples_and_layers_that_only_some_use(
        cuts: tuple[int, ...], stage: int) -> None:
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def heads() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(3, 3) for _ in range(4)]).double()  # nobody uses the last

    def losses(model: Any, group: int) -> Tensor:
        return model[group](x[cuts[group] : cuts[group + 1]]).square().sum(1)

    def trained(comm: Comm) -> Any:
        def build(group: Comm) -> Any:
            if stage:
                return zero(heads(), group, stage, lr=0.1)
            model = DataParallel(heads(), group)
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)

        def backward(model: Any, step: int, group: int) -> int:
            each = losses(model.module, group)
            if not len(each) and step:
                return 0
            return int(model.backward(each.mean() if len(each) else None, len(each)))

        replicas = Replicas(comm, 1, build)
        while replicas.steps < 3:
            replicas.step(backward)
        return full_state_dict(replicas.model)

    module = heads()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.cat([losses(module, group) for group in range(3) if cuts[group] < cuts[group + 1]]
                  ).mean().backward()
        optimizer.step()
    for state in dtlab.simulate(trained, network=dtlab.topology.uniform(3, 1e-5, 1e9)).values:
        assert difference(state, module.state_dict()) < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("event", [1, 3])
def test_no_group_is_whole_before_the_first_step(event: int, ranks: int) -> None:
    values = dtlab.simulate(replicated, ranks, network=NETWORK, crash={1: event, 2: event + ranks},
                            detect_s=0.1, restart_s=0.3, trace=False).values
    check_replicas(values, ranks)


def test_an_optimizer_that_needs_the_whole_group_for_its_step_is_refused() -> None:
    def replicas(comm: Comm, ranks: int) -> None:
        Replicas(comm, ranks, lambda group: zero(nn.Linear(2, 2), group, 1, LAMB))

    dtlab.simulate(replicas, 1, network=NETWORK)
    with pytest.raises(dtlab.ConfigError, match="a step of LAMB on parts of layers needs all"):
        dtlab.simulate(replicas, 2, network=NETWORK)


def test_what_build_and_backward_return_is_checked() -> None:
    def replicas(comm: Comm, wrap: bool) -> None:
        def build(group: Comm) -> Any:
            model = DataParallel(nn.Linear(2, 2), group) if wrap else nn.Linear(2, 2)
            return model, torch.optim.SGD(model.parameters())

        Replicas(comm, 1, build).step(lambda model, step, group: None)  # type: ignore[arg-type, return-value]

    for wrap, says in ((False, "Replicas takes what DataParallel, zero or hybrid returned"),
                       (True, "count of samples, which backward returns, must be a whole number")):
        with pytest.raises(dtlab.ConfigError, match=says):
            dtlab.simulate(replicas, wrap, network=NETWORK)


# ---- on processes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("answer", ["restart", "shrink", "replicas"])
def test_recovers_from_kills_at_random_moments(
        tmp_path: Path, answer: str, request: pytest.FixtureRequest,
        record_property: Any) -> None:
    """SIGKILL, `--recoveries` times: inside an all-reduce, a save, a copy to a neighbour, a
    recovery."""
    dice, slowest_s = random.Random(5), 0.0
    expected = one_device("mlp", "adam", STEPS)
    if answer == "restart":
        undisturbed = dtlab.run(noisy, tmp_path, {}, ranks=RANKS).values[0][0]
    for number in range(request.config.getoption("recoveries")):
        folder = tmp_path / str(number)
        folder.mkdir()
        kills = {number % RANKS: dice.uniform(0.0, 0.3)}
        if number % 3 == 2:  # another one while the others recover
            # Not the one with the copy; nor of the group that goes on alone.
            other = number + 2 if answer == "shrink" else number ^ 1
            kills[other % RANKS] = kills[number % RANKS] + dice.uniform(0.0, 0.03)
        if answer == "restart":
            values = dtlab.run(noisy, folder, kills, number % 2 == 0, ranks=RANKS, max_restarts=3,
                               trace=False, echo=False).values
            for state, step, longest_s in values:
                assert step == STEPS
                assert all(torch.equal(state[name], undisturbed[name]) for name in undisturbed)
                slowest_s = max(slowest_s, longest_s)
        elif answer == "shrink":
            values = dtlab.run(shrinking, number % 4, folder, kills, ranks=RANKS,
                               may_die=range(RANKS), trace=False).values
            assert all(values[victim] is None for victim in kills)
            for state, size, longest_s in filter(None, values):
                assert size == RANKS - len(kills)
                assert difference(state, expected) < 1e-10
                slowest_s = max(slowest_s, longest_s)
        else:
            values = dtlab.run(replicated, 1 + number % 2, folder, kills, ranks=RANKS,
                               may_die=range(RANKS), max_restarts=2, trace=False).values
            check_replicas(values, 1 + number % 2)
            slowest_s = max([slowest_s, *(longest_s for _, _, longest_s in filter(None, values))])
    record_property(answer, slowest_s)
    assert slowest_s < 10
