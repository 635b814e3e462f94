"""Chapter 15: a training that is killed and started anew ends with the same bits."""

from __future__ import annotations

import io
from collections import Counter, UserDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.compare import difference
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import always

F64 = torch.float64
HIDDEN = 8  # units of the layer with dropout
SHAPES = [(HIDDEN, 6), (HIDDEN,), (3, HIDDEN), (3,)]  # of the weights
Plan = Sequence[int]  # process i of a plan is killed as it begins its own step `plan[i]`, from 0


class ProcessKilled(BaseException):
    """Ends a process that is killed."""


class PickledDisk(UserDict[str, Any]):
    """A dictionary of pickled copies, which the next process gets."""

    def __setitem__(self, name: str, value: Any) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        self.data[name] = file.getvalue()

    def __getitem__(self, name: str) -> Any:
        return torch.load(io.BytesIO(self.data[name]), weights_only=False)


class Stateful(SimpleNamespace):
    """Stands for an optimizer or a scheduler: a state to save and to restore."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class TrainingScript:
    """The state with which a training script starts. Only the referee has samples, so it takes each
    step: it gets disk, indices, mask, rate, weights and velocities, and returns new weights and
    velocities, or None if the process is killed."""

    def __init__(self, ask: Callable[..., Any], plan: int, disk: PickledDisk,
                 weights: Sequence[Tensor], samples: int, batch: int, steps: int, every: int,
                 seed: int):
        self.samples, self.batch, self.steps, self.every = samples, batch, steps, every
        self.seed, self._ask, self._plan, self._disk = seed, ask, plan, disk
        torch.manual_seed(seed)
        self._dropout = nn.Dropout(0.5)
        self.model = nn.Sequential(nn.Linear(6, HIDDEN, dtype=F64), nn.Tanh(), self._dropout,
                                   nn.Linear(HIDDEN, 3, dtype=F64))
        self._set(weights)
        self.optimizer = Stateful(rate=0.2, velocities=[torch.zeros_like(w) for w in weights])
        self.scheduler = Stateful(steps=0)

    def step(self, indices: Any) -> None:
        """Train on these samples: forward, backward, the optimizer's step, and the scheduler's:
        after each third step, the rate is 0.7 of what it was."""
        chosen, optimizer = torch.arange(self.samples)[indices], self.optimizer
        mask = self._dropout(torch.ones(len(chosen), HIDDEN, dtype=F64))
        new = self._ask(self._plan, self._disk.data, chosen, mask, optimizer.rate, self.weights(),
                        optimizer.velocities)
        if new is None:
            raise ProcessKilled
        self._set(new[0])
        optimizer.velocities = new[1]
        self.scheduler.steps += 1
        optimizer.rate *= 1 if self.scheduler.steps % 3 else 0.7

    def weights(self) -> list[Tensor]:
        """Return copies of the weights."""
        return [p.detach().clone() for p in self.model.parameters()]

    def _set(self, weights: Sequence[Tensor]) -> None:
        for p, new in zip(self.model.parameters(), weights, strict=True):
            p.data.copy_(new)


def run_processes(function: Callable[..., Any], ask: Callable[..., Any], plans: Sequence[int],
                  *job: int) -> list[list[Tensor]]:
    """In the sandbox, run this rank's process of each of these plans. Returns the weights at the
    end of each."""
    found = []
    for plan in plans:
        disk = PickledDisk()
        disk.data, weights = ask(plan)
        own_job = TrainingScript(ask, plan, disk, weights, *job)
        with suppress(ProcessKilled):
            function(own_job, disk)
        ask(plan, disk.data)
        found.append(own_job.weights())
    return found


class TrainingOracle:
    """The referee's side of process number `rank` of each plan: it takes the steps, kills the
    process, and sends the disk to the plan's next process. notes: by plan, the number of "steps"
    that the process took, and of disks "saved" too early."""

    def __init__(self, plans: Sequence[Plan], samples: int, every: int, key: object, rank: int):
        self._plans, self._every, self._rank = plans, every, rank
        self._samples = [normals((key, plan), (samples, 6), (samples, 3))
                         for plan in range(len(plans))]
        self._weights = [normals((key, plan, "weights"), *SHAPES) for plan in range(len(plans))]
        self.notes = [Counter[str]() for _ in plans]
        self._disks: dict[int, Any] = {}  # by plan, at the last request
        self._ended = [rank > len(plan) for plan in plans]

    def __call__(self, comm: Comm, plan: int, *request: Any) -> Any:
        """Begin the process at (plan), take a step at (plan, disk, …), end it at (plan, disk)."""
        kills, taken = self._plans[plan], self.notes[plan]["steps"]
        if not request:
            disk = comm.recv_object(self._rank - 1)[0] if self._rank else {}
            self._disks[plan] = disk
            return disk, self._weights[plan]
        disk, *step = request
        if step and disk != self._disks[plan]:  # each process begins at a multiple of `every`
            self._disks[plan] = disk
            self.notes[plan]["saved"] += taken % self._every > 0
        last = self._rank == len(kills)
        if step and not self._ended[plan] and (last or taken < kills[self._rank]):
            self.notes[plan]["steps"] += 1
            x, y = self._samples[plan]
            return _step(x, y, *step)
        if not self._ended[plan] and not last:
            comm.send([disk], self._rank + 1)
        self._ended[plan] = True
        return None


def _step(x: Tensor, y: Tensor, indices: Tensor, mask: Tensor, rate: float,
          weights: Sequence[Tensor], velocities: Sequence[Tensor]
          ) -> tuple[list[Tensor], list[Tensor]]:
    """v ← 0.9 v + gradient; w ← w − rate · v. The referee computes it for right and tried answers
    alike: bits may differ in a sandbox, where torch can't tell the CPU's kind."""
    if indices.numel() > len(x):  # more would take the referee's memory
        raise ConfigError(f"a step on {indices.numel()} samples, and there are {len(x)}")
    sizes = [(len(indices), HIDDEN), *2 * SHAPES]
    if [each.shape for each in (mask, *weights, *velocities)] != sizes:
        raise ConfigError("a step on weights of other shapes")
    w1, b1, w2, b2 = new = [w.clone().requires_grad_() for w in weights]
    hidden = linear(x[indices], w1, b1).tanh() * mask
    gradients = torch.autograd.grad(mse_loss(linear(hidden, w2, b2), y[indices]), new)
    moved = [0.9 * v + g for v, g in zip(velocities, gradients, strict=True)]
    return [w.detach() - rate * v for w, v in zip(new, moved, strict=True)], moved


def _without_kills(job: TrainingScript, _disk: PickledDisk) -> None:
    for step in range(job.steps):
        epoch, place = divmod(step, -(-job.samples // job.batch))
        random = torch.Generator().manual_seed(job.seed + epoch)
        order = torch.randperm(job.samples, generator=random)
        job.step(order[place * job.batch:(place + 1) * job.batch])


@cache
def _right(plans: int, key: object, *job: int) -> list[list[Tensor]]:
    """The weights at the end of each of the plans, if nothing is killed."""
    with torch.random.fork_rng(devices=[]):
        oracle: Any = TrainingOracle([()] * plans, job[0], 1, key, 0)
        return run_processes(_without_kills, partial(oracle, None), range(plans), *job)


def _judge(case: Case, outcome: Outcome) -> Verdict:
    """The same bits, no step taken again but those since the last save, and no other saves."""
    plans, key, (_, *job) = case.facts["plans"], case.facts["key"], case.args[0]
    right = _right(len(plans), key, *job)
    for plan, kills in enumerate(plans):
        plans_of_last, *_ = case.args[len(kills)]
        actual, weights = outcome.values[len(kills)][plans_of_last.index(plan)], right[plan]
        when = f"killed in step {' and '.join(map(str, kills))}" if kills else "never killed"
        wrong = difference("weights", actual, weights, 1e-9)
        if wrong or not all(map(torch.equal, actual, weights)):
            what, wanted = wrong or ("other bits", "the same bits")
            return Verdict(False, f"{when}: {what}", wanted, evidence=actual)
        processes = [notes[plan] for notes in outcome.notes]
        if early := [rank for rank, dies in enumerate(kills) if processes[rank]["steps"] < dies]:
            return Verdict(False, f"{when}: process {early[0]} ended by itself, with steps left",
                           "steps until all are taken")
        done = sum(processes, Counter[str]())
        took, most = done["steps"], _most_steps(kills, *job)
        if took > most:
            return Verdict(False, f"{when}: the same bits in {took} steps", f"≤ {most} steps",
                           evidence=took)
        if kills and done["saved"]:
            return Verdict(False, f"{when}: saved in between, {counted(done['saved'], 'time')}",
                           f"saved after every {job[3]} steps")
    return Verdict(True, "the same bits", "the same bits")


def _most_steps(kills: Plan, _samples: int, _batch: int, steps: int, every: int, _seed: int) -> int:
    saved = 0
    for dies in kills:
        lost = (saved + dies) % every
        saved, steps = saved + dies - lost, steps + lost
    return steps


def _case(seed: int, tried: str, *plans: Plan, job: tuple[int, ...] = (14, 4, 13, 2)) -> Case:
    job_seed = 7 + varied(seed, 10**9)  # the learner's function sees it
    plans_of_rank = [[number for number, kills in enumerate(plans) if len(kills) >= rank]
                     for rank in range(1 + max(map(len, plans)))]
    key = (seed, tried)
    return Case(tried, [(own, *job, job_seed) for own in plans_of_rank], comm=False,
                harness=run_processes, oracle=partial(TrainingOracle, plans, job[0], job[3], key),
                facts={"plans": plans, "key": key})


def _build(seed: int) -> list[Check]:
    case = partial(_case, seed)
    no_kill, early = case("13 steps", ()), case("killed in step 0, 1", (0,), (1,))
    first = case("killed in step 2, 3", (2,), (3,))
    later = [case("killed in step 4 to 12", *((kill,) for kill in (4, 6, 7, 9, 12))),
             case("3 steps from save to save", *((kill,) for kill in range(3, 11)),
                  job=(10, 3, 11, 3))]
    again = case("killed twice and more", (5, 3), (7, 0), (1, 4), (9, 2, 1))
    return [
        Check("never killed", 1, "13 steps", [no_kill], _judge),
        Check("nothing saved", 1, "killed in step 0, 1", [early], _judge, requires=always),
        Check("first epoch", 2, "killed in step 2, 3", [first], _judge, requires=always),
        Check("later epochs", 2, "killed in later steps", later, _judge, requires=always),
        Check("killed again", 2, "two and three times", [again], _judge, requires=always),
    ]


EXERCISE = Exercise("restart-bits", "Restart bit for bit", "train", _build)
