"""Chapter 09: which server holds which key, so that few move when a server joins or fails."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable
from typing import Any

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator, varied
from dtlab.grading.exercise import Check, Exercise, Verdict

Place = Callable[[list[str], list[str], int], Any]
KEYS = 2_000
BUSIEST = 1.4  # of the mean: about 100 points a server keep within it
SHARE = 1.5  # of 1/(n+1): what may move to a new server
LEAST = 1.2 * SHARE  # a server has at least one LEAST-th of its share


class RehashedText(str):
    """A text whose hash is that of another process."""

    def __hash__(self) -> int:
        return ("another process", str.__hash__(self)).__hash__()


def elsewhere(place: Place, keys: list[str], servers: list[str], copies: int, far: bool) -> Any:
    """Place keys in the learner's process. far: with hashes as another process may have them."""
    real = builtins.hash
    if far:
        builtins.hash = lambda x: real(("another process", real(x)))
        keys = [*map(RehashedText, keys)]
    try:
        placed = place(keys, servers, copies)
        return {str(key): mine for key, mine in placed.items()} if far else placed
    finally:
        builtins.hash = real


def _placed(case: Case, outcome: Outcome) -> Verdict:
    """Is every key on as many different servers as it should be?"""
    for placed, (keys, servers, copies, *_) in zip(outcome.values, case.args, strict=True):
        count = min(copies, len(servers))
        wanted = f"a dict: each key → a list of {count} of the servers"
        if set(placed) != set(keys):
            return Verdict(False, f"{len(placed)} keys", wanted)
        for key in keys:
            mine = placed[key]
            if not set(mine) <= set(servers) or len(set(mine)) < len(mine) or len(mine) != count:
                twice = " twice" * (len(set(mine)) < len(mine))
                return Verdict(False, f"{key} → {mine}"[:80], wanted, evidence=(len(mine), twice))
        if len(servers) > 2 and len({placed[key][0] for key in keys}) == 1:
            return Verdict(False, f"all keys on the same of {len(servers)} servers",
                           "different keys, different servers", evidence="one server has all")
    return Verdict(True, "each key, different servers", "each key, different servers")


def _balance(case: Case, outcome: Outcome) -> Verdict:
    (placed,), ((_, servers, _),) = outcome.values, case.args
    loads = Counter(mine[0] for mine in placed.values())
    most = max(loads.values()) * len(servers) / len(placed)
    return Verdict(most <= BUSIEST, f"busiest server: {most:.2f} × the mean",
                   f"≤ {BUSIEST} × the mean", evidence="unbalanced")


def _moved(case: Case, outcome: Outcome) -> Verdict:
    """Judge which keys move from the first list of servers to the second, which has one more."""
    (before, after), ((_, old, _), (_, servers, _)) = outcome.values, case.args
    (new,) = set(servers) - set(old)
    moved = [key for key in before if before[key][0] != after[key][0]]
    astray = [key for key in moved if after[key][0] != new]
    fair = len(before) / len(servers)
    actual = f"{len(moved)} keys move" + f", {len(astray)} of them astray" * bool(astray)
    return Verdict(not astray and fair / LEAST <= len(moved) <= SHARE * fair, actual,
                   f"about {fair:.0f} of {len(before)} keys, all to {new}",
                   rounds=f"{len(moved)} / {SHARE * fair:.0f}")


def _gone(case: Case, outcome: Outcome) -> Verdict:
    """Judge which keys move from the first list of servers to the second, which has one fewer."""
    (before, after), ((_, old, _), (_, servers, _)) = outcome.values, case.args
    (dead,), share = set(old) - set(servers), len(before) / len(old)
    needless = [key for key, mine in before.items() if mine[0] not in (dead, after[key][0])
                or {*mine} - {dead} - {*after[key]}]
    if needless:
        return Verdict(False, f"{len(needless)} keys leave servers that live", "none of them")
    orphans = [key for key in before if before[key][0] == dead]
    if cold := [key for key in orphans if after[key][0] != before[key][1]]:
        return Verdict(False, f"{len(cold)} of {len(orphans)} keys go to a server without a copy",
                       "each to the server with its second copy")
    if len(orphans) < share / LEAST:
        return Verdict(False, f"{dead} held {len(orphans)} of {len(before)} keys, too few",
                       f"about {share:.0f}")
    heirs = Counter(after[key][0] for key in orphans)
    most, fair = max(heirs.values(), default=0), len(orphans) / len(servers)
    return Verdict(most <= 3 * fair, f"one server inherits {most} of {len(orphans)} keys",
                   f"about {fair:.0f} each")


def _stable(case: Case, outcome: Outcome) -> Verdict:
    here, there, reordered = outcome.values
    for other, where in ((there, "in another process"),
                         (reordered, "if the lists are in another order")):
        if moved := sum(here[key] != other[key] for key in here):
            return Verdict(False, f"{moved} of {len(here)} keys elsewhere {where}",
                           "the same everywhere")
    return Verdict(True, "the same everywhere", "the same everywhere")


def _build(seed: int) -> list[Check]:
    draw = generator(seed)

    def named(count: int) -> list[str]:
        """Draw names in order, with gaps, so that none shows which server is missing."""
        numbers = draw.choice(range(1000, 10_000), count, replace=False)
        return [f"server-{number}" for number in sorted(numbers)]

    def drawn_keys(n: int) -> list[str]:
        """Draw keys of no other case: a process serves many, and may remember its answers."""
        model = draw.integers(10**9)
        return [f"model{model}.layer{number}" for number in range(n)]

    def case(text: str, servers: list[list[str]], copies: int = 1, n: int = KEYS) -> Case:
        """Each list of servers on a rank of its own, which can't remember the others' answers."""
        keys = drawn_keys(n)
        return Case(text, [(keys, some, copies) for some in servers], comm=False)

    def comes(n: int) -> Case:
        after = named(n + 1)
        return case(f"from {n} to {n + 1} servers", [after[:n], after])

    def dies(n: int, d: int, copies: int = 2) -> Case:
        before, d = named(n), (d + varied(seed, n, "dies")) % n
        return case(f"{n} servers, one dies", [before, before[:d] + before[d + 1 :]], copies)

    one = [case(f"{n} server{'s' * (n > 1)}, 1 copy", [named(n)], n=50)
           for n in (*range(1, 10), 13)]
    many = [case(f"{n} servers, {copies} copies", [named(n)], copies, n=200)
            for n, copies in ((5, 2), (8, 3), (3, 3), (2, 3), (1, 2))]
    plain = varied(seed, 10**6, "plain")
    even = [case(f"{n} servers, {KEYS} keys", [[f"server-{plain}-{i}" for i in range(n)]])
            for n in (2, 5, 8)]  # on names like these a hundred points a server are enough
    more = [comes(n) for n in (1, 3, 4, 8)]
    fewer = [dies(n, d) for n, d in ((4, 1), (8, 0))] + [dies(6, 5, 3)]
    keys, five = drawn_keys(200), named(5)
    calls = [(keys, five, 2, False), (keys, five, 2, True), (keys[::-1], five[::-1], 2, False)]
    other = Case("3 calls, 5 servers", calls, comm=False, harness=elsewhere)
    return [
        Check("a placement", 1, "1 to 9, 13 servers", one, _placed),
        Check("copies", 2, "2 and 3 copies", many, _placed),
        Check("balance", 2, "2, 5, 8 servers", even, _balance, _placed),
        Check("a server comes", 2, "to 1, 3, 4, 8 servers", more, _moved, _placed),
        Check("a server dies", 2, "one of 4, 8, 6", fewer, _gone, _placed),
        Check("everywhere the same", 1, "another process, another order", [other], _stable,
              _placed),
    ]


EXERCISE = Exercise("consistent-hashing", "Rebalance with consistent hashing", "place_keys", _build)
