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

SIZE = 1000  # numbers in a checkpoint: too many to hide them in names of files
MOST_NAME_BYTES = 255  # as on Linux
POINTS = 40  # operations at which processes are killed; a right answer needs 15 for three saves
MOST_FILES = 4  # enough for three checkpoints and a pointer
SURVIVES = {"whole": 1.0, "torn": 0.5, "lost": 0.0}  # the share of unsynced data after a crash
DISK_BYTES = 1 << 20  # names included
MOST_OPERATIONS = 200  # of one save; the referee ignores later ones
NEVER = -1  # `Kill` of a process that is not killed
Kill = tuple[int, str]  # the operation at which the process is killed; a key of `SURVIVES`


class Disk:
    """Files in memory. A change of names is durable at once; written data is durable once it has
    been synced. log: the operations, in order."""

    def __init__(self, files: dict[str, bytes]):
        self.log: list[tuple[Any, ...]] = []
        self._files, self._unsynced = dict(files), set[str]()

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        return self._files[name]

    def write(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._files[name] = bytes(memoryview(data))  # bytes(5) alone would be five zeros
        self._unsynced.add(name)
        self.log.append(("write", name, self._files[name]))
        if sum(len(name) + len(data) for name, data in self._files.items()) > DISK_BYTES:
            raise ConfigError(f"the disk is full: it has room for {DISK_BYTES:,} bytes")

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
        if not isinstance(name, str) or len(name.encode()) > MOST_NAME_BYTES:
            raise ConfigError(f"the name of a file is a text of at most {MOST_NAME_BYTES} bytes, "
                              f"not {name!r:.40}")

    def files_after_crash(self, unsynced: str) -> dict[str, bytes]:
        """Return the files that the next process finds. unsynced: a key of `SURVIVES`."""
        return {name: data[:int(len(data) * SURVIVES[unsynced])] if name in self._unsynced else data
                for name, data in self._files.items()}


def run_processes(function: Callable[..., Any], ask: Callable[..., Any], plans: Sequence[int],
                  moves: bool) -> int:
    """In the sandbox, run this rank's process of each of these plans: it loads, and saves as often
    as the referee tells it to. moves: training changes the weights while a save is under way.
    Returns the number of plans."""
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


class KillPlan(NamedTuple):
    """A plan for processes that use one disk in turn: one for each kill, one that saves and ends,
    and a last one that only loads. damage: the index of the file that is damaged before the last
    process begins, if there are as many files: all of its bytes, or one bit."""

    kills: Sequence[Kill] = ()
    saves: int = 3  # of each process
    damage: int = POINTS
    all_bytes: bool = False


class Process:
    """The referee's record of process number `rank` of a plan, and its disk. The process is killed
    once its log has more operations than `operations_left`: the referee drops the rest."""

    def __init__(self, plan: KillPlan, key: object, rank: int):
        self._plan, self._key, self._rank = plan, key, rank
        self.last = rank == len(plan.kills) + 1
        self.operations_left, self._unsynced = (
            plan.kills[rank] if rank < len(plan.kills) else (NEVER, "whole"))
        self.may_die, self.died = NEVER < self.operations_left < POINTS, False
        self.saves_left = 0 if self.last else plan.saves
        self._disk = Disk({})
        self._saved = self._begun = 0  # the last step whose save has ended; whose save has begun
        self.step: int | None = -1  # of what it loaded; -1: that is no state; None: it is None
        self.wrong: Difference | None = None  # in the weights that it has loaded
        self.least = self.most = 0  # the steps that it may load
        self.files = 0  # how many it has found
        self._loaded = False

    def begin(self, comm: Comm) -> dict[str, bytes]:
        """Return the files that the process finds."""
        files: dict[str, bytes] = {}
        if self._rank:
            files, self._saved, self._begun = comm.recv_object(self._rank - 1)
        if self.last and self._plan.damage < len(files):
            name = sorted(files)[self._plan.damage]
            files[name] = _damaged(files[name], self._plan.all_bytes)
        self._disk = Disk(files)
        return files

    def go_on(self, comm: Comm, log: Sequence[Sequence[Any]], *loaded: Any
              ) -> tuple[int, Tensor] | None:
        """Continue after a load or a save. Return (step, weights) to save next; None: it ends."""
        for operation, *args in log[:MOST_OPERATIONS]:
            if operation not in ("write", "sync", "rename", "remove"):
                raise ConfigError(f"a disk has no {operation!r:.20}")
            self.died = self.died or (self._loaded and self.operations_left == 0)
            if not self.died:
                self.operations_left -= self._loaded
                getattr(self._disk, operation)(*args)
        self._disk.log = []  # it would keep what was written
        if not self._loaded:
            self._load(*loaded)
        elif not self.died:
            self._saved, self.saves_left = self._begun, self.saves_left - 1
        if self.saves_left > 0 and not self.died:
            self._begun = self._saved + 1
            return self._begun, _weights(self._key, self._begun)
        if not self.last:
            files = self._disk.files_after_crash(self._unsynced)
            comm.send([files, self._saved, self._begun], self._rank + 1)
        return None

    def _load(self, state: Any) -> None:
        self._loaded = True
        damaged = self.last and self._plan.damage < POINTS  # so the one before is right, too
        self.least, self.most = max(0, self._saved - damaged), self._begun
        self.files = len(self._disk.names())
        if state is None:
            self.step = None
        elif isinstance(state, dict) and type(state.get("step")) is int:
            self.step = state["step"]
            wanted = _weights(self._key, self.step) if self.step else ANY
            self.wrong = difference("weights", state.get("weights"), wanted)
        self._saved = max(self._saved, min(self.step or 0, self._begun))


def _damaged(data: bytes, all_bytes: bool) -> bytes:
    """Change all bytes, which no pickle survives; or one bit in the middle, in a pickled state one
    of the weights, so that unpickling alone does not notice it."""
    if all_bytes:
        return bytes(byte ^ 255 for byte in data)
    at = len(data) // 2
    return data[:at] + bytes(byte ^ 64 for byte in data[at:at + 1]) + data[at + 1:]


@cache  # each process of a plan compares with what the ones before have saved
def _weights(key: object, step: int) -> Tensor:
    return normals((key, step), SIZE, dtype=F32)[0]


class DiskOracle:
    """The referee's side of a rank's processes. It alone knows what they save, and when each is
    killed. notes: process number `rank` of each plan."""

    def __init__(self, plans: Sequence[KillPlan], key: object, rank: int):
        self.notes = [Process(plan, (key, number), rank) for number, plan in enumerate(plans)]

    def __call__(self, comm: Comm, plan: int, *report: Any) -> Any:
        """Begin at (plan); continue at (plan, log, what was loaded), then at (plan, log)."""
        process = self.notes[plan]
        return process.go_on(comm, *report) if report else process.begin(comm)


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
            return Verdict(False, actual, newest, evidence=[step, number])
        if process.wrong:
            return Verdict(False, f"step {step}: {process.wrong[0]}", process.wrong[1],
                           evidence=[step, number])
        if process.died and not process.may_die:
            return Verdict(False, f"more than {POINTS} operations", f"≤ {POINTS} operations")
    return Verdict(True, "each time the newest", "the newest")


def _few_files(case: Case, outcome: Outcome) -> Verdict:
    most = outcome.notes[1][0].files
    return Verdict(most <= MOST_FILES, f"{most} files", f"≤ {MOST_FILES} files", evidence=most)


def _case(seed: int, tried: str, plans: Sequence[KillPlan], moves: bool = False) -> Case:
    order = generator(seed, tried).permutation(len(plans)) if seed else range(len(plans))
    plans = [plans[n] for n in order]  # so that a process can't tell its plan by the number
    args = [([number for number, plan in enumerate(plans) if rank < len(plan.kills) + 2], moves)
            for rank in range(2 + max(len(plan.kills) for plan in plans))]
    return Case(tried, args, comm=False, harness=run_processes,
                oracle=partial(DiskOracle, plans, (seed, tried)), facts={"plans": plans})


def _build(seed: int) -> list[Check]:
    case = partial(_case, seed)
    cuts = {unsynced: case(f"3 saves, what is unsynced {unsynced}",
                         [KillPlan([(point, unsynced)]) for point in range(POINTS + 1)])
            for unsynced in SURVIVES}
    odd, more = varied(seed, 2, "cuts"), varied(seed, 5, "saves")
    twice = [case(f"a second cut, after one at {', '.join(map(str, firsts))}",
                  [KillPlan([(first, "torn"), (second, "lost")], 2)
                   for first in [*firsts, POINTS] for second in [*range(12), POINTS]])
             for firsts in (range(odd, 6, 2), range(6 + odd, 12, 2), range(12 + odd, 18, 2))]
    damaged = [case(f"3 saves, then damage to {what} of a file",
                    [KillPlan(damage=damage, all_bytes=all_bytes) for damage in range(MOST_FILES)])
               for what, all_bytes in (("one bit", False), ("all bytes", True))]
    return [
        Check("no kill", 1, "1, 2 and more saves",
              [case(f"{n} saves", [KillPlan((), n)]) for n in (1, 2, 5 + more)], _judge),
        Check("beside training", 1, "weights that change while a save is under way",
              [case(f"{n} saves, beside training", [KillPlan((), n)], moves=True)
               for n in (1, 3 + more)], _judge, requires=always),
        Check("killed", 2, "at every operation", [cuts["whole"]], _judge,
              requires=always),
        Check("power cut", 2, "at every operation; unsynced data torn, or lost",
              [cuts["torn"], cuts["lost"], *twice], _judge,
              requires=always),
        Check("damage", 1, "to each of the files", damaged, _judge, requires=always),
        Check("room", 1, "12 saves", [case("12 saves", [KillPlan((), 12)])], _few_files,
              requires=_judge),
    ]


EXERCISE = Exercise("surviving-checkpoint", "The checkpoint that survives", "checkpoints", _build)
