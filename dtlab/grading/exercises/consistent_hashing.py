"""Chapter 09: which server holds which key, so that few move when a server joins or fails."""

from __future__ import annotations

import builtins
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict

Place = Callable[[list[str], list[str], int], Any]
Placed = dict[str, list[str]]
KEYS = 2_000
BUSIEST = 1.4  # of the mean: about 100 points a server keep within it
SHARE = 1.5  # of 1/(n+1): what may move to a new server


# ---- in the learner's process ------------------------------------------------------------------


def elsewhere(place: Place, keys: list[str], servers: list[str], copies: int, far: bool) -> Any:
    """far: with Python's `hash` seeded as another process may have it."""
    real = builtins.hash
    if far:
        builtins.hash = lambda x: real(("another process", real(x)))
    try:
        return place(keys, servers, copies)
    finally:
        builtins.hash = real


# ---- in the judge ------------------------------------------------------------------------------


def _trouble(placed: Any, keys: list[str], servers: list[str], copies: int) -> Verdict | None:
    """Is every key on as many different servers as it should be?"""
    count = min(copies, len(servers))
    wanted = f"a dict: each key → a list of {count} of the servers"
    if not isinstance(placed, dict) or set(placed) != set(keys):
        came = f"a dict of {len(placed)} keys" if isinstance(placed, dict) else f"{placed!r:.60}"
        return Verdict(False, came, wanted, clue="Return a dict with every key, and no other.")
    for key in keys:
        mine = placed[key]
        if not isinstance(mine, (list, tuple)) or not all(isinstance(s, str) for s in mine):
            return Verdict(False, f"{key} → {mine!r:.60}", wanted,
                           clue="Each key has a *list* of servers, also if it is only one.")
        if unknown := [server for server in mine if server not in servers]:
            return Verdict(False, f"{key} → {unknown[0]!r:.40}, which isn't there", wanted)
        if len(set(mine)) < len(mine):
            return Verdict(False, f"{key} → {mine}", wanted,
                           clue="Two copies on one server die together. The next point on the ring "
                                "may be the same server's: go on until you find another one.")
        if len(mine) != count:
            return Verdict(False, f"{key} → {counted(len(mine), 'server')}", wanted,
                           clue=f"Each key is on `copies` servers; on all, if there are fewer. "
                                f"Here: {count}.")
    return None


def _placed(case: Case, outcome: Outcome) -> Verdict:
    copies = case.facts["copies"]
    for placed, servers in zip(outcome.values, case.facts["servers"], strict=True):
        trouble = _trouble(placed, case.facts["keys"], servers, copies)
        if trouble:
            return trouble
    return Verdict(True, "each key, different servers", "each key, different servers")


def _balance(case: Case, outcome: Outcome) -> Verdict:
    (placed,), (servers,) = outcome.values, case.facts["servers"]
    loads = Counter(mine[0] for mine in placed.values())
    most = max(loads.values()) * len(servers) / len(placed)
    came, wanted = f"busiest server: {most:.2f} × the mean", f"≤ {BUSIEST} × the mean"
    if most <= BUSIEST:
        return Verdict(True, came, wanted)
    clue = ("Put each server on the ring many times (a hundred virtual nodes, say), each time "
            "under another name: f\"{server}/{v}\".")
    if len(loads) < len(servers):
        clue = f"{len(servers) - len(loads)} of the servers hold nothing at all. " + clue
    return Verdict(False, came, wanted, clue=clue)


def _moved(case: Case, outcome: Outcome) -> Verdict:
    """From the first list of servers to the second, which has one more."""
    before, after = outcome.values
    (new,) = set(case.facts["servers"][1]) - set(case.facts["servers"][0])
    moved = [key for key in before if before[key][0] != after[key][0]]
    astray = [key for key in moved if after[key][0] != new]
    fair = len(before) / len(case.facts["servers"][1])
    rounds = f"{len(moved)} / {SHARE * fair:.0f}"
    wanted = f"about {fair:.0f} of {len(before)} keys, all to {new}"
    if astray:
        return Verdict(False, f"{len(moved)} keys move, {len(astray)} of them to another server "
                       f"than {new}", wanted, rounds=rounds,
                       clue="A key's place may depend on no count of servers (hash mod n does) and "
                            "on no server's place in the list: only on the key's hash and the "
                            "servers' own. Then a new server takes keys, and nothing else moves.")
    if len(moved) > SHARE * fair or len(moved) < fair / SHARE / 1.2:
        return Verdict(False, f"{len(moved)} keys move", wanted, rounds=rounds,
                       clue="The new server takes too much or too little. With few points on the "
                            "ring, shares are a matter of luck: give each server about a hundred.")
    return Verdict(True, f"{len(moved)} keys move, all to {new}", wanted, rounds=rounds)


def _gone(case: Case, outcome: Outcome) -> Verdict:
    """From the first list of servers to the second, which has one fewer; two copies each."""
    before, after = outcome.values
    (dead,) = set(case.facts["servers"][0]) - set(case.facts["servers"][1])
    needless = [key for key in before if dead not in before[key] and before[key] != after[key]]
    if needless:
        return Verdict(False, f"{len(needless)} keys move that {dead} never held", "none of them",
                       clue="Only what the dead server held may move. A key's place may depend on "
                            "no count of servers, nor on a server's place in the list.")
    orphans = [key for key in before if before[key][0] == dead]
    if cold := [key for key in orphans if after[key][0] != before[key][1]]:
        return Verdict(False, f"{len(cold)} of {len(orphans)} keys go to a server without a copy",
                       "each to the server with its second copy",
                       clue="The copies of a key are the next different servers round the ring. "
                            "Then, when the first dies, the next one is first, and has the copy.")
    heirs = Counter(after[key][0] for key in orphans)
    most, fair = max(heirs.values(), default=0), len(orphans) / len(case.facts["servers"][1])
    if most > 3 * fair:
        return Verdict(False, f"one server inherits {most} of {len(orphans)} keys",
                       f"about {fair:.0f} each",
                       clue="All keys of the dead server fall to one neighbour, and may overload "
                            "it. With many points a server has many neighbours.")
    return Verdict(True, f"{len(orphans)} keys move, each to its copy",
                   "only what must, to its copy")


def _stable(case: Case, outcome: Outcome) -> Verdict:
    here, there, reordered = outcome.values
    wanted = "the same everywhere"
    if (moved := sum(here[key] != there[key] for key in here)):
        return Verdict(False, f"{moved} of {len(here)} keys elsewhere in another process", wanted,
                       clue="Python's hash() of a text differs from process to process (or your "
                            "hash draws random numbers): workers would ask the wrong servers. Take "
                            "hashlib: int.from_bytes(hashlib.blake2b(text.encode(), "
                            "digest_size=8).digest(), \"big\").")
    if (moved := sum(here[key] != reordered[key] for key in here)):
        return Verdict(False, f"{moved} keys elsewhere if the lists are in another order", wanted,
                       clue="Two workers may list the same servers in another order. A key's place "
                            "depends on the servers' names, not on their places in the list.")
    return Verdict(True, wanted, wanted)


def _build(seed: int) -> list[Check]:
    draw = random.Random(seed)

    def named(count: int) -> list[str]:
        """In order, with gaps, so that nobody sees which server is missing."""
        return [f"server-{number}" for number in sorted(draw.sample(range(1000, 10_000), count))]

    def drawn_keys(n: int) -> list[str]:
        """Of no other case: a process serves many, and may remember what it answered."""
        model = draw.randrange(10**9)
        return [f"model{model}.layer{number}" for number in range(n)]

    def case(text: str, servers: list[list[str]], copies: int = 1, n: int = KEYS) -> Case:
        """Each list of servers on a rank of its own, which can't remember the others' answers."""
        keys = drawn_keys(n)
        return Case(text, [(keys, some, copies) for some in servers], comm=False,
                    facts={"keys": keys, "servers": servers, "copies": copies})

    def comes(n: int) -> Case:
        after = named(n + 1)
        return case(f"from {n} to {n + 1} servers", [after[:n], after])

    def dies(n: int, d: int) -> Case:
        before = named(n)
        return case(f"{n} servers, one dies", [before, before[:d] + before[d + 1 :]], 2)

    one = [case(f"{n} server{'s' * (n > 1)}, 1 copy", [named(n)], n=50)
           for n in (*range(1, 10), 13)]
    many = [case(f"{n} servers, {copies} copies", [named(n)], copies, n=200)
            for n, copies in ((5, 2), (8, 3), (3, 3), (2, 3), (1, 2))]
    even = [case(f"{n} servers, {KEYS} keys", [[f"server-{seed}-{i}" for i in range(n)]])
            for n in (2, 5, 8)]  # on names like these a hundred points a server are enough
    more = [comes(n) for n in (1, 3, 4, 8)]
    fewer = [dies(n, d) for n, d in ((4, 1), (8, 0), (6, 5))]
    keys, five = drawn_keys(200), named(5)
    calls = [(keys, five, 2, False), (keys, five, 2, True), (keys[::-1], five[::-1], 2, False)]
    other = Case("3 calls, 5 servers", calls, comm=False, harness=elsewhere,
                 facts={"keys": keys, "servers": [five] * 3, "copies": 2})
    return [
        Check("a placement", 1, "1 to 9, 13 servers", one, _placed, "Behind the last point "
              "the ring begins anew: take the index modulo the number of points."),
        Check("copies", 2, "2 and 3 copies", many, _placed),
        Check("balance", 2, "2, 5, 8 servers", even, _balance, provided=_placed),
        Check("a server comes", 2, "to 1, 3, 4, 8 servers", more, _moved, provided=_placed),
        Check("a server dies", 2, "one of 4, 8, 6", fewer, _gone, provided=_placed),
        Check("everywhere the same", 1, "another process, another order", [other], _stable,
              provided=_placed),
    ]


EXERCISE = Exercise("consistent-hashing", "Rebalance with consistent hashing", "09", 2,
                    "place_keys", _build)
