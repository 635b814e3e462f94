"""Chapter 15: checkpoints on a disk that is killed at every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import cloudpickle
import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.compare import difference
from dtlab.grading.draws import numbers, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F32, always

SIZE = 50  # numbers in a checkpoint
POINTS = 40  # operations that are tried; a right answer needs about 15 for three saves
MOST_FILES = 4  # that three checkpoints and a pointer may take
SAFE = {"whole": 1.0, "torn": 0.5, "lost": 0.0}  # the share of unsynced data that is left
Kill = tuple[int, str]  # at which operation the process dies, and what became of unsynced data
Found = tuple[int, int, Any, int]  # the last save that ended; that began; loaded; how many files


class Killed(BaseException):
    """The process ends here."""


class Disk:
    """Files in memory. Names change at once and for good; what `write` brings is safe once it has
    been synced. At operation number `dies` the process ends."""

    def __init__(self, files: dict[str, bytes]):
        self._files, self._unsynced, self.dies = dict(files), set[str](), -1

    def _operation(self) -> None:
        if self.dies == 0:
            raise Killed
        self.dies -= 1

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        return self._files[name]

    def write(self, name: str, data: bytes) -> None:
        self._operation()
        self._files[name] = bytes(data)
        self._unsynced.add(name)

    def sync(self, name: str) -> None:
        self._operation()
        self._unsynced.discard(name)

    def rename(self, old: str, new: str) -> None:
        self._operation()
        self._files[new] = self._files.pop(old)
        self._unsynced = {new if name == old else name for name in self._unsynced - {new}}

    def remove(self, name: str) -> None:
        self._operation()
        del self._files[name]
        self._unsynced.discard(name)

    def after(self, became: str) -> dict[str, bytes]:
        """What the next process finds."""
        return {name: data[:int(len(data) * SAFE[became])] if name in self._unsynced else data
                for name, data in self._files.items()}


def live(function: Callable[..., Any], plans: Sequence[Sequence[Kill]], saves: int, moves: bool,
         damages: int, start: torch.Tensor) -> list[Found]:
    """In the learner's process: what is found after each plan of kills, and after damage to each of
    so many files."""
    fresh = cloudpickle.dumps(function)  # nothing in memory outlives a process
    return [found for kills in plans for damage in (range(damages) if damages else [POINTS])
            for found in _live(lambda files: cloudpickle.loads(fresh)(files), kills, saves, moves,
                               damage, start)]


def _live(start: Callable[[Disk], Any], kills: Sequence[Kill], saves: int, moves: bool, damage: int,
          weights: torch.Tensor) -> Iterator[Found]:
    """Processes, each of which loads, and saves `saves` times; the last one only loads. moves:
    training goes on, and changes the weights, while a save is under way."""
    files, done, begun = dict[str, bytes](), 0, 0
    for dies, became in [*kills, (-1, "whole")]:
        disk = Disk(files)
        save, load = start(disk)
        state = load() or {"step": 0, "weights": weights.clone()}
        yield done, begun, deepcopy(state), len(files)
        done = max(done, first := int(state["step"]))
        disk.dies = dies
        with suppress(Killed):
            for begun in range(first + 1, first + saves + 1):
                state["step"] = begun
                state["weights"] += int(not moves)
                saving = save(state)
                next(saving, None)
                state["weights"] += int(moves)
                list(saving)
                done = begun
        files = disk.after(became)
    for name in sorted(files)[damage:damage + 1]:
        files[name] = files[name][:-9] + b"*" * min(9, len(files[name]))
    _, load = start(Disk(files))
    yield done, begun, load(), len(files)


def _judge(case: Case, outcome: Outcome) -> Verdict:
    _, _, moves, damages, start = case.args[0]
    for number, (done, begun, loaded, _) in enumerate(outcome.values[0]):
        least = max(0, done - 1) if damages else done
        newest = f"step {least}" + f" or {begun}" * (begun > least)
        step = loaded.get("step") if isinstance(loaded, dict) else 0 if loaded is None else -1
        if not isinstance(step, int) or not least <= step <= begun:
            came = "no checkpoint loads" if loaded is None else f"step {step!r:.20} was loaded"
            return Verdict(False, came, newest, shows=[step, number])
        weights = start + step - int(moves)
        if step and (wrong := difference("weights", loaded.get("weights"), weights)):
            return Verdict(False, f"step {step}: {wrong[0]}", wrong[1], shows=[step, loaded])
    return Verdict(True, f"{len(outcome.values[0])} times the newest", "the newest")


def _room(case: Case, outcome: Outcome) -> Verdict:
    most = max(files for *_, files in outcome.values[0])
    return Verdict(most <= MOST_FILES, f"{most} files", f"≤ {MOST_FILES} files", shows=most)


def _build(seed: int) -> list[Check]:
    start = numbers((seed, "weights"), (SIZE,), F32) / 8

    def case(tried: str, plans: Sequence[Sequence[Kill]] = ((),), saves: int = 3,
             moves: bool = False, damages: int = 0) -> Case:
        return Case(tried, [(plans, saves, moves, damages, start)], comm=False, harness=live)

    cuts = {became: case("3 saves", [[(point, became)] for point in range(POINTS)])
            for became in SAFE}
    odd, more = varied(seed, 2, "cuts"), varied(seed, 5, "saves")
    twice: list[list[Kill]] = [[(first, "torn"), (second, "lost")]
                               for first in range(odd, 18, 2) for second in range(12)]
    return [
        Check("no kill", 1, "1, 2 and more saves",
              [case(f"{n} saves", saves=n) for n in (1, 2, 5 + more)], _judge),
        Check("beside training", 1, "weights that change while a save is under way",
              [case(f"{n} saves", saves=n, moves=True) for n in (1, 3 + more)], _judge,
              provided=always),
        Check("killed", 2, "at every operation", [cuts["whole"]], _judge,
              provided=always),
        Check("power cut", 2, "at every operation; unsynced data torn, or lost",
              [cuts["torn"], cuts["lost"], case("a second cut", twice, 2)], _judge,
              provided=always),
        Check("damage", 1, "to each of the files", [case("3 saves", damages=MOST_FILES)], _judge,
              provided=always),
        Check("room", 1, "12 saves", [case("12 saves", saves=12)], _room, provided=_judge),
    ]


EXERCISE = Exercise("surviving-checkpoint", "The checkpoint that survives", "checkpoints", _build)
