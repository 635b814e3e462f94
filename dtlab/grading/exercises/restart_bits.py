"""Chapter 15: a training that is killed and started anew ends with the same bits."""

from __future__ import annotations

import io
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from dtlab.grading.case import Case, Outcome
from dtlab.grading.compare import difference
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import always

F64 = torch.float64


class Killed(BaseException):
    """The process ends here."""


class Disk(UserDict[str, Any]):
    """What is put here stays when the process dies: a copy of it."""

    def __setitem__(self, name: str, value: Any) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        self.data[name] = file.getvalue()

    def __getitem__(self, name: str) -> Any:
        return torch.load(io.BytesIO(self.data[name]), weights_only=False)


class Momentum:
    """The optimizer: v ← 0.9 v + gradient; w ← w − rate · v. (Importing torch.optim writes files,
    which the sandbox forbids.)"""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters, self.rate = list(parameters), 0.2
        self._velocities = [torch.zeros_like(p) for p in self._parameters]

    def step(self) -> None:
        for p, v in zip(self._parameters, self._velocities, strict=True):
            v.mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
            p.data -= self.rate * v
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "velocities": self._velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self._velocities = state["rate"], state["velocities"]


class Falling:
    """The scheduler: after each third step the optimizer's rate is 0.7 of what it was."""

    def __init__(self, optimizer: Momentum):
        self._optimizer, self._steps = optimizer, 0

    def step(self) -> None:
        self._steps += 1
        self._optimizer.rate *= 1 if self._steps % 3 else 0.7

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class Job:
    """What a script builds before it trains; `step` trains, and may be the end of the process."""

    def __init__(self, dies: int, samples: int, batch: int, steps: int, every: int, seed: int):
        self.samples, self.batch, self.steps, self.every = samples, batch, steps, every
        self.seed, self.taken, self._dies = seed, 0, dies
        torch.manual_seed(seed)
        self._x, self._y = (torch.randn(samples, width, dtype=F64) for width in (6, 3))
        self.model = nn.Sequential(nn.Linear(6, 8, dtype=F64), nn.Tanh(), nn.Dropout(0.5),
                                   nn.Linear(8, 3, dtype=F64))
        self.optimizer = Momentum(self.model.parameters())
        self.scheduler = Falling(self.optimizer)

    def step(self, indices: Any) -> None:
        """Train on these samples: forward, backward, the optimizer's step and the scheduler's."""
        if self.taken == self._dies:
            raise Killed
        self.taken += 1
        mse_loss(self.model(self._x[indices]), self._y[indices]).backward()
        self.optimizer.step()
        self.scheduler.step()


def live(function: Callable[..., Any], plans: Sequence[Sequence[int]], *job: int
         ) -> list[tuple[list[torch.Tensor], int]]:
    """In the learner's process: the weights, and how many steps were taken in all, without a kill,
    and after each plan of kills: number i of its processes dies as it begins step `kills[i]`."""
    found = []
    for kills in ((), *plans):
        disk, taken = Disk(), 0
        for dies in (*kills, -1):
            now = Job(dies, *job)
            with suppress(Killed):
                function(now, disk)
            taken += now.taken
        found.append(([p.detach().clone() for p in now.model.parameters()], taken))
    return found


def _undisturbed(job: Job, _disk: Disk) -> None:
    for step in range(job.steps):
        epoch, place = divmod(step, -(-job.samples // job.batch))
        random = torch.Generator().manual_seed(job.seed + epoch)
        order = torch.randperm(job.samples, generator=random)
        job.step(order[place * job.batch:(place + 1) * job.batch])


def _judge(case: Case, outcome: Outcome) -> Verdict:
    plans, *job = case.args[0]
    with torch.random.fork_rng(devices=[]):
        (weights, _), = live(_undisturbed, (), *job)
    lives = outcome.values[0]
    for kills, (came, _) in zip(((), *plans), lives, strict=True):
        when = f"killed in step {' and '.join(map(str, kills))}" if kills else "never killed"
        wrong = difference("weights", came, weights, 1e-9)
        if wrong or not all(map(torch.equal, came, lives[0][0])):
            came_in_words, right = wrong or ("other bits", "the same bits")
            return Verdict(False, f"{when}: {came_in_words}", right, shows=came)
    return Verdict(True, "the same bits", "the same bits")


def _work(case: Case, outcome: Outcome) -> Verdict:
    plans, _, _, steps, every, _ = case.args[0]
    took, most = [taken for _, taken in outcome.values[0][1:]], [steps] * len(plans)
    for number, kills in enumerate(plans):
        saved = 0
        for dies in kills:
            lost = (saved + dies) % every
            saved, most[number] = saved + dies - lost, most[number] + lost
    return Verdict(all(a <= b for a, b in zip(took, most, strict=True)),
                   f"{took} steps, by training", f"≤ {most}", shows=took)


def _build(seed: int) -> list[Check]:
    jobs_seed = 7 + varied(seed, 10**9)  # the learner's function sees it

    def case(tried: str, *plans: tuple[int, ...], job: tuple[int, ...] = (14, 4, 13, 2)) -> Case:
        return Case(tried, [(plans, *job, jobs_seed)], comm=False, harness=live)

    calm, early = case("13 steps"), case("killed in step 0, 1", (0,), (1,))
    first = case("killed in step 2, 3", (2,), (3,))
    later = [case("killed in step 4 to 12", *((kill,) for kill in (4, 6, 7, 9, 12))),
             case("3 steps from save to save", *((kill,) for kill in range(3, 11)),
                  job=(10, 3, 11, 3))]
    again = case("killed twice and more", (5, 3), (7, 0), (1, 4), (9, 2, 1))
    return [
        Check("never killed", 1, "13 steps", [calm], _judge),
        Check("first epoch", 2, "killed in step 2, 3", [first], _judge, provided=always),
        Check("later epochs", 2, "killed in later steps", later, _judge, provided=always),
        Check("nothing saved", 1, "killed in step 0, 1", [early], _judge, provided=always),
        Check("killed again", 1, "two and three times", [again], _judge, provided=always),
        Check("work", 1, "steps that are taken again", [first, *later, again], _work,
              provided=_judge),
    ]


EXERCISE = Exercise("restart-bits", "Restart bit for bit", "train", _build)
