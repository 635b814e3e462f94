"""Training on groups of ranks that each hold a whole model. A group that loses a rank leaves; the
others go on; when its rank is back, the group rejoins with the state of another group.

PyTorch's torchft does so, with a *quorum* before each step. Here the quorum is `Comm.shrink`, and
only a death, or a rank that comes back, calls for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from dtlab.checks import check_whole, short
from dtlab.collectives import all_reduce
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError, RankDied
from dtlab.parallel.checkpoint import restore
from dtlab.parallel.checkpoint_contents import contents_of, merged, names_by_group
from dtlab.parallel.large_batch import Layerwise
from dtlab.parallel.sharded import parts_of
from dtlab.parallel.synchronized import DistributedModule, check_distributed

Built = tuple[DistributedModule, torch.optim.Optimizer]


class Replicas:
    """Rank r of the run belongs to group r // ranks, which holds a whole model.

    build(group) makes model and optimizer of this rank on its group's communicator: it is called
    at the start and after each death, so set a learning rate by the step, in `backward`: a
    scheduler would begin anew. steps: how many have been taken. counted: of each step in which this
    rank took part, the groups whose samples it had. Buffers are each group's own.

    Run it with `dtlab.run(…, may_die=range(p), max_restarts=n)`, or with
    `dtlab.simulate(…, detect_s=…, restart_s=…)`.
    """

    def __init__(self, comm: Comm, ranks: int, build: Callable[[Comm], Built]):
        check_comm(comm, "Replicas(comm, ranks, build)")
        check_whole("Replicas: ranks of a group", ranks)
        if not callable(build):
            raise ConfigError(f"Replicas: build takes a communicator; {short(build)} doesn't")
        self.comm, self.ranks, self.steps = comm, ranks, -1
        self._run_size = comm.size  # of the whole run: a rank that joins late hears it from others
        self.counted: dict[int, list[int]] = {}
        self._build = build
        self._built: Built | None = None
        self._names: list[list[str]] = []
        # While groups form: how many steps were taken, and this rank's part of the state then.
        self._own_part: tuple[int, Any] = -1, None
        self._groups: list[int] = []  # the numbers of the groups that take part now
        self._has_average = False  # does this rank have the averaged gradients of the next step?
        try:
            self._new_groups()
        except RankDied:
            self._shrink()

    @property
    def model(self) -> DistributedModule | None:
        """This rank's model; None while its group is not whole."""
        return self._built[0] if self._built else None

    @property
    def number(self) -> int:
        """The number of this rank's group."""
        return self.comm.global_ranks[self.comm.rank] // self.ranks

    def step(self, backward: Callable[[DistributedModule, int, int], int]) -> None:
        """Take one step of all groups that are whole, or begin it anew if a rank dies in it.

        backward(model, step, group) leaves gradients, the mean over the group's samples, and
        returns how many there were. They are averaged over all samples of the groups; when all
        ranks have the average, each takes the optimizer's step. All ranks call this until `steps`
        says that they are done. If no group is whole, it waits for ranks to come back.
        Cost without a death: an all-reduce of the gradients over the groups, one of 8 bytes and 8
        for each parameter, and one of 8 bytes over all ranks.
        """
        try:
            if self._built is not None:
                model, optimizer = self._built
                optimizer.zero_grad()
                samples = backward(model, self.steps, self.number)
                check_whole("Replicas: the count of samples, which backward returns,", samples, 0)
                self._average(model, samples)
                self._has_average = True
            if not self._groups:
                with self.comm.compute("wait for ranks to come back", 0.01):
                    time.sleep(0.01)
            joining = torch.tensor([int(self.comm.joining())], device=self.comm.device)
            all_reduce(self.comm, joining, "max", algorithm="recursive_doubling")
            if self._groups:
                self._commit()
            if joining.item():
                self._shrink()
        except RankDied:
            self._shrink()

    def _average(self, model: DistributedModule, samples: int) -> None:
        """Average over the ranks that hold the same part of the model in other groups. A parameter
        that only some groups have used has a gradient of zeros in the others."""
        parameters = [p for p in model.trained if p.numel()]
        counts = torch.tensor([samples, *(p.grad is not None for p in parameters)],
                              device=self.comm.device)
        all_reduce(self._across_groups, counts, algorithm="recursive_doubling")
        total, *used = counts.tolist()
        for p, groups in zip(parameters, used, strict=True):
            if groups and p.grad is None:
                model.set_zero_gradient(p)
        for _, gradient in model.named_gradients():
            if not samples:
                gradient.zero_()  # the mean of nothing is nan, and 0 times that, too
            gradient *= samples / max(total, 1)
            all_reduce(self._across_groups, gradient, algorithm="auto")

    def _commit(self) -> None:
        """All ranks have the averaged gradients. If one of the group dies while ZeRO hands out the
        parameters, this rank has stepped its own part all the same."""
        self._has_average = False
        self.counted[self.steps] = self._groups
        self.steps += 1
        if self._built is not None:
            self._built[1].step()

    def _shrink(self) -> None:
        """Shrink, and form the groups of the surviving ranks; again if one dies meanwhile."""
        while True:
            try:
                self.comm = self.comm.shrink()
                self._new_groups()
                return
            except RankDied:
                continue

    def _new_groups(self) -> None:
        """Form the groups that are whole, with the newest state on all of their ranks. If a rank
        dies meanwhile, only `_own_part` has changed."""
        comm = self.comm
        holds = self._built is not None or self._own_part[0] == self.steps
        everyone = comm._all_gather_objects((self.steps, self._run_size, holds, self._has_average))
        newest, self._run_size = (max(each[k] for each in everyone) for k in (0, 1))
        check_whole("Replicas: ranks of a group", self.ranks, 1, self._run_size)
        ready = [averaged for at, _, holds, averaged in everyone if holds and at == newest]
        newest += bool(ready) and all(ready)
        # All ranks had the average, so others may have taken the step; this rank's group has ended.
        if self._has_average and self.steps == newest - 1:
            with suppress(RankDied):
                self._commit()
        self._has_average = False
        if self._built is not None:
            self._own_part = self.steps, contents_of(*self._built, self._names, None)
            self._built = None
        groups = [range(first, first + self.ranks)
                  for first in range(0, max(comm.global_ranks) + 1, self.ranks)]
        self._groups = [g for g, ranks in enumerate(groups) if {*ranks} <= {*comm.global_ranks}]
        built, part = None, self._own_part[1] if self._own_part[0] == newest >= 0 else None
        if self.number in self._groups:
            local = comm.global_ranks.index
            group = comm.subgroup(map(local, groups[self.number]))
            self._across_groups = comm.subgroup(local(groups[g][group.rank]) for g in self._groups)
            built = self._build(group)
            if not isinstance(built, tuple) or len(built) != 2:
                raise ConfigError(f"Replicas: build returns model and optimizer, not "
                                  f"{short(built)}")
            check_distributed(built[0], "Replicas")
            _check_optimizer(*built)
            self._names = names_by_group(built[0].comm, *built)
            if newest < 0 and self.number == self._groups[0]:  # all begin as this group does
                part = contents_of(*built, self._names, None)
        part = self._fetch_part(part, needs=built is not None and part is None)
        if built is not None:
            parts = built[0].comm._all_gather_objects(part)
            restore(*built, lambda: merged(parts), "Replicas")
            self._own_part = -1, None
        self._built = built
        self.steps = max(newest, 0) if self._groups else newest  # without a state there is no step

    def _fetch_part(self, part: dict[str, Any] | None, needs: bool) -> dict[str, Any] | None:
        """Return `part` of the newest state, or, if this rank of a whole group has none, that of
        the same place in another group."""
        comm, place = self.comm, self.comm.global_ranks[self.comm.rank] % self.ranks
        places = comm._all_gather_objects((place, part is not None, needs))
        sources = {at: rank for rank, (at, has, _) in reversed([*enumerate(places)]) if has}
        for rank, (at, _, missing) in enumerate(places):
            if missing and at not in sources:
                raise ConfigError("Replicas: every rank that held one of the parts of the model "
                                  "has died; load a checkpoint")
            if missing and comm.rank == sources[at]:
                comm.send(part, rank)
            if missing and comm.rank == rank:
                part = comm.recv_object(sources[at])
        return part


def _check_optimizer(model: DistributedModule, optimizer: Any) -> None:
    """Raise `ConfigError` if a step needs all ranks of a group, of which one may have died."""
    if isinstance(optimizer, Layerwise) and model.comm.size > 1 and (
            model.sharded or parts_of(model.module)):
        raise ConfigError(f"Replicas: a step of {type(optimizer).__name__} on parts of layers "
                          f"needs all ranks of a group, of which one may have died; use another "
                          f"optimizer, or DataParallel in each group")
