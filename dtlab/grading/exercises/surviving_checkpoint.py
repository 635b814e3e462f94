"""Chapter 15: checkpoints on a disk that is killed at every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.compare import difference
from dtlab.grading.draws import generator, numbers, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F32, always

SIZE = 50  # numbers in a checkpoint
POINTS = 40  # operations that are tried; a right answer needs about 15 for three saves
MOST_FILES = 4  # that three checkpoints and a pointer may take
SAFE = {"whole": 1.0, "torn": 0.5, "lost": 0.0}  # the share of unsynced data that is left
ROOM = 1 << 20  # bytes of a disk, names included
LOG = 200  # operations of a save that are looked at
NEVER = -1  # the number of the operation at which a process dies that does not
Kill = tuple[int, str]  # at which operation the process dies, and what became of unsynced data


class Files:
    """Files in memory. Names change at once and for good; what `write` brings is safe once it has
    been synced."""

    def __init__(self, files: dict[str, Tensor]):
        self.files, self._unsynced = dict(files), set[str]()

    def write(self, name: str, data: Tensor) -> None:
        self.files[name] = data.flatten()
        self._unsynced.add(name)

    def sync(self, name: str) -> None:
        self._unsynced.discard(name)

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)
        self._unsynced = {new if name == old else name for name in self._unsynced - {new}}

    def remove(self, name: str) -> None:
        del self.files[name]
        self._unsynced.discard(name)

    def change(self, operation: str, *of: Any) -> None:
        """One of the above, as a process says that it has done it."""
        if operation not in ("write", "sync", "rename", "remove"):
            raise ConfigError(f"a disk has no {operation!r:.20}")
        getattr(self, operation)(*of)
        if sum(len(name) + len(data) for name, data in self.files.items()) > ROOM:
            raise ConfigError(f"the disk is full: it has room for {ROOM:,} bytes")

    def after(self, became: str) -> dict[str, Tensor]:
        """What the next process finds."""
        return {name: data[:int(len(data) * SAFE[became])] if name in self._unsynced else data
                for name, data in self.files.items()}


class Disk:
    """In the sandbox: a process's disk, and what it has done with it."""

    def __init__(self, files: dict[str, Tensor]):
        self._files, self._log = Files(files), list[tuple[Any, ...]]()

    def names(self) -> list[str]:
        return sorted(self._files.files)

    def read(self, name: str) -> bytes:
        return self._files.files[name].numpy().tobytes()

    def write(self, name: str, data: bytes) -> None:
        self._change("write", name, torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)))

    def sync(self, name: str) -> None:
        self._change("sync", name)

    def rename(self, old: str, new: str) -> None:
        self._change("rename", old, new)

    def remove(self, name: str) -> None:
        self._change("remove", name)

    def _change(self, operation: str, *of: Any) -> None:
        getattr(self._files, operation)(*of)
        self._log.append((operation, *of))

    def log(self) -> list[tuple[Any, ...]]:
        """The operations since the last call."""
        log, self._log = self._log, []
        return log


def live(function: Callable[..., Any], ask: Callable[..., Any], plans: Sequence[int], moves: bool
         ) -> int:
    """In the sandbox: of each of these plans one process, which loads, and saves while there is
    something to save; other ranks have the others. moves: training goes on, and changes the
    weights, while a save is under way. Returns how many processes these were."""
    fresh = cloudpickle.dumps(function)  # nothing in memory outlives a process
    for plan in plans:
        disk = Disk(ask(plan))
        state: dict[str, Any] = {"step": 0, "weights": torch.zeros(SIZE)}
        pair = cloudpickle.loads(fresh)(disk)
        if not (isinstance(pair, (tuple, list)) and [*map(callable, pair)] == [True, True]):
            raise TypeError(f"the answer returned {type(pair).__name__}, not two functions, save "
                            f"and load")
        save, load = pair
        loaded = load()
        given = ask(plan, disk.log(), loaded)
        while given:
            state["step"] = given[0]
            state["weights"].copy_(given[1])
            saving = save(state)
            next(saving, None)
            state["weights"] += int(moves)
            list(saving)
            given = ask(plan, disk.log())
    return len(plans)


class Plan(NamedTuple):
    """What happens to the processes that share a disk: each kill ends one; of the last two, one
    saves and ends, and one loads. damage: to which of the files, at last, if there are as many."""

    kills: Sequence[Kill] = ()
    saves: int = 3  # of each process
    damage: int = POINTS


class Found(NamedTuple):
    """What a process has loaded. done: the last step whose save had ended; begun: that had begun.
    """

    done: int
    begun: int
    step: int | None  # None: it loaded nothing; -1: something that is no state
    wrong: tuple[str, str] | None  # of its weights: what came, what was saved
    files: int


class Process:
    """In the referee: the process number `rank` of a plan, and its disk. It dies where its log
    holds more operations than it lives for: what is after them has not happened."""

    def __init__(self, plan: Plan, of: object, rank: int):
        self._of, self._rank, self.last = of, rank, rank == len(plan.kills) + 1
        self.left, self._became = plan.kills[rank] if rank < len(plan.kills) else (NEVER, "whole")
        self._damage, self.damaged = plan.damage, self.last and plan.damage < POINTS
        self.may_die, self.died = NEVER < self.left < POINTS, False
        self.saves = 0 if self.last else plan.saves  # that are still to end
        self._files = Files({})
        self._done = self._begun = self._step = 0
        self.found: Found | None = None

    def begin(self, comm: Comm) -> dict[str, Tensor]:
        """What the process before has left."""
        files: dict[str, Tensor] = {}
        if self._rank:
            left, self._done, self._begun = comm.recv_object(self._rank - 1)
            files = {name: torch.from_numpy(data) for name, data in left.items()}
        for name in sorted(files)[self._damage:self._damage + 1] if self.last else ():
            files[name] = _damaged(files[name])
        self._files = Files(files)
        return files

    def go_on(self, comm: Comm, log: Sequence[Sequence[Any]], *loaded: Any
              ) -> tuple[int, Tensor] | None:
        """The process has loaded or saved. What it saves next; None: it ends."""
        first = self.found is None
        for operation in log[:LOG]:
            self.died = self.died or (not first and self.left == 0)
            if not self.died:
                self.left -= not first
                self._files.change(*operation)
        if first:
            self._load(*loaded)
        elif not self.died:
            self._done, self.saves = self._step, self.saves - 1
        if self.saves and not self.died:
            self._begun = self._step = self._step + 1
            return self._step, self._weights(self._step)
        if not self.last:
            left = self._files.after(self._became)  # as arrays: tensors take long to pickle
            comm.send([{name: data.numpy() for name, data in left.items()}, self._done,
                       self._begun], self._rank + 1)
        return None

    def _load(self, state: Any) -> None:
        step = state.get("step", -1) if isinstance(state, dict) else None if state is None else -1
        step = step if step is None or type(step) is int else -1
        wrong = difference("weights", state.get("weights"), self._weights(step)) if (
            isinstance(state, dict) and step) else None
        self.found = Found(self._done, self._begun, step, wrong, len(self._files.files))
        self._step = max(self._done, min(step or 0, self._begun))
        self._done = self._step

    def _weights(self, step: int | None) -> Tensor:
        return _drawn(self._of, step)


def _damaged(data: Tensor) -> Tensor:
    """Other bytes: of a pickled state such that pickle alone does not notice it."""
    was = data.numpy().tobytes()
    other = was.replace(b"step", b"stop") if b"step" in was else was[:-9] + b"*" * len(was[-9:])
    return torch.from_numpy(np.frombuffer(bytearray(other), np.uint8))


@cache  # each process of a plan compares with what the ones before have saved
def _drawn(of: object, step: int | None) -> Tensor:
    return numbers((of, step), (SIZE,), F32) / 8


class Kills:
    """In the referee: the processes number `rank` of all plans. It alone knows what they save, and
    when they die.

    notes: these processes.
    """

    def __init__(self, plans: Sequence[Plan], of: object, rank: int):
        self.notes = [Process(plan, (of, number), rank) for number, plan in enumerate(plans)]

    def __call__(self, comm: Comm, plan: int, *said: Any) -> Any:
        """(plan): begins. (plan, log, what it has loaded); (plan, log): goes on."""
        process = self.notes[plan]
        return process.go_on(comm, *said) if said else process.begin(comm)


def _judge(case: Case, outcome: Outcome) -> Verdict:
    plans = case.facts["plans"]
    processes = [outcome.notes[rank][number] for number, plan in enumerate(plans)
                 for rank in range(len(plan.kills) + 2)]
    for number, process in enumerate(processes):
        found = process.found or Found(0, 0, -1, None, 0)
        least = max(0, found.done - process.damaged)
        newest = f"step {least}" + f" or {found.begun}" * (found.begun > least)
        step = found.step or 0
        if not least <= step <= found.begun:
            came = {None: "no checkpoint loads", -1: "what was loaded is no state"}.get(
                found.step, f"step {step} was loaded")
            return Verdict(False, came, newest, shows=[step, number])
        if found.wrong:
            return Verdict(False, f"step {step}: {found.wrong[0]}", found.wrong[1],
                           shows=[step, number])
        if process.died and not process.may_die:
            return Verdict(False, f"more than {POINTS} operations", f"≤ {POINTS} operations")
    return Verdict(True, "each time the newest", "the newest")


def _room(case: Case, outcome: Outcome) -> Verdict:
    most = outcome.notes[1][0].found.files
    return Verdict(most <= MOST_FILES, f"{most} files", f"≤ {MOST_FILES} files", shows=most)


def _case(seed: int, tried: str, plans: Sequence[Plan], moves: bool = False) -> Case:
    order = generator(seed, tried).permutation(len(plans)) if seed else range(len(plans))
    plans = [plans[n] for n in order]  # which one it is, a process can't tell
    args = [([number for number, plan in enumerate(plans) if rank < len(plan.kills) + 2], moves)
            for rank in range(2 + max(len(plan.kills) for plan in plans))]
    return Case(tried, args, comm=False, harness=live,
                oracle=partial(Kills, plans, (seed, tried)), facts={"plans": plans})


def _build(seed: int) -> list[Check]:
    case = partial(_case, seed)
    cuts = {became: case(f"3 saves, what is unsynced {became}",
                         [Plan([(point, became)]) for point in range(POINTS + 1)])
            for became in SAFE}
    odd, more = varied(seed, 2, "cuts"), varied(seed, 5, "saves")
    twice = [case(f"a second cut, after one at {', '.join(map(str, firsts))}",
                  [Plan([(first, "torn"), (second, "lost")], 2)
                   for first in [*firsts, POINTS] for second in [*range(12), POINTS]])
             for firsts in (range(odd, 6, 2), range(6 + odd, 12, 2), range(12 + odd, 18, 2))]
    damaged = [Plan(damage=damage) for damage in range(MOST_FILES)]
    return [
        Check("no kill", 1, "1, 2 and more saves",
              [case(f"{n} saves", [Plan((), n)]) for n in (1, 2, 5 + more)], _judge),
        Check("beside training", 1, "weights that change while a save is under way",
              [case(f"{n} saves, beside training", [Plan((), n)], moves=True)
               for n in (1, 3 + more)], _judge, provided=always),
        Check("killed", 2, "at every operation", [cuts["whole"]], _judge,
              provided=always),
        Check("power cut", 2, "at every operation; unsynced data torn, or lost",
              [cuts["torn"], cuts["lost"], *twice], _judge,
              provided=always),
        Check("damage", 1, "to each of the files", [case("3 saves, then damage", damaged)], _judge,
              provided=always),
        Check("room", 1, "12 saves", [case("12 saves", [Plan((), 12)])], _room, provided=_judge),
    ]


EXERCISE = Exercise("surviving-checkpoint", "The checkpoint that survives", "checkpoints", _build)
