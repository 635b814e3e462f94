"""Chapter 15: checkpoints on a disk that is killed at every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.grading.case import ANY, Case, Outcome
from dtlab.grading.compare import Difference, difference
from dtlab.grading.draws import generator, normals, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F32, always

SIZE = 1000  # numbers in a checkpoint: more than names hold
NAME = 255  # bytes of a name, as on Linux
POINTS = 40  # operations that are tried; a right answer needs about 15 for three saves
MOST_FILES = 4  # that three checkpoints and a pointer may take
SAFE = {"whole": 1.0, "torn": 0.5, "lost": 0.0}  # the share of unsynced data that is left
ROOM = 1 << 20  # bytes of a disk, names included
LOG = 200  # operations of a save that are looked at
NEVER = -1  # the number of the operation at which a process dies that does not
Kill = tuple[int, str]  # at which operation the process dies, and what became of unsynced data


class Disk:
    """Files in memory. Names change at once and for good; what `write` brings is safe once it has
    been synced. log: what was done with them."""

    def __init__(self, files: dict[str, bytes]):
        self.log: list[tuple[Any, ...]] = []
        self._files, self._unsynced = dict(files), set[str]()

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        return self._files[name]

    def write(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._files[name] = bytes(memoryview(data))  # of no number, which would be as many zeros
        self._unsynced.add(name)
        self.log.append(("write", name, self._files[name]))
        if sum(len(name) + len(data) for name, data in self._files.items()) > ROOM:
            raise ConfigError(f"the disk is full: it has room for {ROOM:,} bytes")

    def sync(self, name: str) -> None:
        self._unsynced.discard(name)
        self.log.append(("sync", name))

    def rename(self, old: str, new: str) -> None:
        self._check_name(new)
        self._files[new] = self._files.pop(old)
        self._unsynced = {new if name == old else name for name in self._unsynced - ({new} - {old})}
        self.log.append(("rename", old, new))

    def remove(self, name: str) -> None:
        del self._files[name]
        self._unsynced.discard(name)
        self.log.append(("remove", name))

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or len(name.encode()) > NAME:
            raise ConfigError(f"the name of a file is a text of at most {NAME} bytes, not "
                              f"{name!r:.40}")

    def after(self, became: str) -> dict[str, bytes]:
        """Return the files that the next process finds."""
        return {name: data[:int(len(data) * SAFE[became])] if name in self._unsynced else data
                for name, data in self._files.items()}


def live(function: Callable[..., Any], ask: Callable[..., Any], plans: Sequence[int], moves: bool
         ) -> int:
    """In the sandbox, run of each of these plans one process, which loads, and saves while there is
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
        given = ask(plan, disk.log, loaded)
        while given:
            disk.log = []
            state["step"] = given[0]
            state["weights"].copy_(given[1])
            saving = save(state)
            next(saving, None)
            state["weights"] += int(moves)
            list(saving)
            given = ask(plan, disk.log)
    return len(plans)


class Plan(NamedTuple):
    """A plan for the processes that share a disk: each kill ends one; of the last two, one saves
    and ends, and one loads. damage: the index of the file that is damaged at last, if there are as
    many files; all of its bytes, or one bit."""

    kills: Sequence[Kill] = ()
    saves: int = 3  # of each process
    damage: int = POINTS
    all_bytes: bool = False


class Process:
    """The referee's record of the process number `rank` of a plan, and its disk. It dies where its
    log holds more operations than it lives for: what is after them has not happened."""

    def __init__(self, plan: Plan, of: object, rank: int):
        self._of, self._rank, self.last = of, rank, rank == len(plan.kills) + 1
        self.left, self._became = plan.kills[rank] if rank < len(plan.kills) else (NEVER, "whole")
        self._damage, self._damaged = plan.damage, self.last and plan.damage < POINTS
        self._all_bytes = plan.all_bytes
        self.may_die, self.died = NEVER < self.left < POINTS, False
        self.saves = 0 if self.last else plan.saves  # that are still to end
        self._disk = Disk({})
        self._done = self._begun = 0  # the last step whose save has ended; has begun
        # What it has loaded. -1: something that is no state; None: nothing.
        self.step: int | None = -1
        self.wrong: Difference | None = None  # of the weights that it has loaded
        self.least = self.most = self.files = 0  # the steps that it may load; how many files
        self._loaded = False

    def begin(self, comm: Comm) -> dict[str, bytes]:
        """Return the files that the process before has left."""
        files: dict[str, bytes] = {}
        if self._rank:
            files, self._done, self._begun = comm.recv_object(self._rank - 1)
        for name in sorted(files)[self._damage:self._damage + 1] if self.last else ():
            files[name] = _damaged(files[name], self._all_bytes)
        self._disk = Disk(files)
        return files

    def go_on(self, comm: Comm, log: Sequence[Sequence[Any]], *loaded: Any
              ) -> tuple[int, Tensor] | None:
        """Go on after a load or a save. Return what the process saves next; None: it ends."""
        for operation, *of in log[:LOG]:
            if operation not in ("write", "sync", "rename", "remove"):
                raise ConfigError(f"a disk has no {operation!r:.20}")
            self.died = self.died or (self._loaded and self.left == 0)
            if not self.died:
                self.left -= self._loaded
                getattr(self._disk, operation)(*of)
        self._disk.log = []  # it would keep what was written
        if not self._loaded:
            self._load(*loaded)
        elif not self.died:
            self._done, self.saves = self._begun, self.saves - 1
        if self.saves > 0 and not self.died:
            self._begun = self._done + 1
            return self._begun, _drawn(self._of, self._begun)
        if not self.last:
            comm.send([self._disk.after(self._became), self._done, self._begun], self._rank + 1)
        return None

    def _load(self, state: Any) -> None:
        self._loaded = True
        self.least, self.most = max(0, self._done - self._damaged), self._begun
        self.files = len(self._disk.names())
        if state is None:
            self.step = None
        elif isinstance(state, dict) and type(state.get("step")) is int:
            self.step = state["step"]
            wanted = _drawn(self._of, self.step) if self.step else ANY
            self.wrong = difference("weights", state.get("weights"), wanted)
        self._done = max(self._done, min(self.step or 0, self._begun))


def _damaged(data: bytes, all_bytes: bool) -> bytes:
    """All bytes others, of which pickle makes nothing; or one other bit: of a pickled state among
    its weights, which pickle alone does not notice."""
    if all_bytes:
        return bytes(byte ^ 255 for byte in data)
    at = len(data) // 2
    return data[:at] + bytes(byte ^ 64 for byte in data[at:at + 1]) + data[at + 1:]


@cache  # each process of a plan compares with what the ones before have saved
def _drawn(of: object, step: int) -> Tensor:
    return normals((of, step), SIZE, dtype=F32)[0]


class Kills:
    """The referee's record of the processes number `rank` of all plans. It alone knows what they
    save, and when they die.

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
        least, most, step = process.least, process.most, process.step or 0
        newest = f"step {least}" + f" or {most}" * (most > least)
        if not least <= step <= most:
            actual = {None: "no checkpoint loads", -1: "what was loaded is no state"}.get(
                process.step, f"step {step} was loaded")
            return Verdict(False, actual, newest, shows=[step, number])
        if process.wrong:
            return Verdict(False, f"step {step}: {process.wrong[0]}", process.wrong[1],
                           shows=[step, number])
        if process.died and not process.may_die:
            return Verdict(False, f"more than {POINTS} operations", f"≤ {POINTS} operations")
    return Verdict(True, "each time the newest", "the newest")


def _room(case: Case, outcome: Outcome) -> Verdict:
    most = outcome.notes[1][0].files
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
    damaged = [case(f"3 saves, then damage to {what} of a file",
                    [Plan(damage=damage, all_bytes=all_bytes) for damage in range(MOST_FILES)])
               for what, all_bytes in (("one bit", False), ("all bytes", True))]
    return [
        Check("no kill", 1, "1, 2 and more saves",
              [case(f"{n} saves", [Plan((), n)]) for n in (1, 2, 5 + more)], _judge),
        Check("beside training", 1, "weights that change while a save is under way",
              [case(f"{n} saves, beside training", [Plan((), n)], moves=True)
               for n in (1, 3 + more)], _judge, requires=always),
        Check("killed", 2, "at every operation", [cuts["whole"]], _judge,
              requires=always),
        Check("power cut", 2, "at every operation; unsynced data torn, or lost",
              [cuts["torn"], cuts["lost"], *twice], _judge,
              requires=always),
        Check("damage", 1, "to each of the files", damaged, _judge, requires=always),
        Check("room", 1, "12 saves", [case("12 saves", [Plan((), 12)])], _room, requires=_judge),
    ]


EXERCISE = Exercise("surviving-checkpoint", "The checkpoint that survives", "checkpoints", _build)
