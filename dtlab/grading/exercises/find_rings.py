"""Chapter 06: two rings without a common wire, judged as rings: any two will do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import networkx as nx

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import always
from dtlab.topology.cycles import edges_of
from dtlab.topology.servers import V100_LINKS

Links = dict[tuple[int, int], int]
Pair = tuple[int, int]


def _case(name: str, ranks: int, links: Links, seed: object, *, solvable: bool = True) -> Case:
    """A case of this mesh, with its ranks renumbered and its links in another order."""
    random = generator(seed, name, ranks)
    names = random.permutation(ranks).tolist()
    items = [((min(names[a], names[b]), max(names[a], names[b])), wires)
             for (a, b), wires in links.items()]
    wires = dict(items[i] for i in random.permutation(len(items)))
    return Case(f"{name}, {ranks} ranks", [(ranks, wires)], comm=False,
                facts={"solvable": solvable})


# ---- meshes ------------------------------------------------------------------------------------


def _complete(ranks: int, without: int = 0) -> Links:
    """Join every rank to every other, without the first `without` of the links 0–1, 2–3, …"""
    missing = [(rank, rank + 1) for rank in range(0, 2 * without, 2)]
    return {pair: 1 for pair in combinations(range(ranks), 2) if pair not in missing}


def _grid(x: int, y: int) -> Links:
    """A torus: y rows of x, closed to rings."""
    torus = nx.convert_node_labels_to_integers(nx.grid_2d_graph(y, x, periodic=True))
    return {(min(pair), max(pair)): 1 for pair in torus.edges}


def _two_rings(ranks: int, more: int, seed: object) -> Links:
    """A ring, another one that shares no wire with it, and a few more links."""
    random = generator(seed, ranks, more)
    first = list(_edges(list(range(ranks))))
    second = first
    while set(first) & set(second):
        second = list(_edges(random.permutation(ranks).tolist()))
    free = [pair for pair in combinations(range(ranks), 2) if pair not in {*first, *second}]
    added = [free[i] for i in random.permutation(len(free))[:more]]
    return dict.fromkeys([*first, *second, *added], 1)


def _bundled(ranks: int) -> Links:
    """A ring of double links, and two single ones that no ring can use: both rings are the same."""
    return {**dict.fromkeys(_edges(list(range(ranks))), 2), (0, 2): 1, (1, 3): 1}


def _halves(ranks: int, joined: int) -> Links:
    """Join two halves by `joined` (2 or 4) wires, of which each ring needs two. The total number of
    links is the same for both, so that it does not tell whether there are two rings."""
    half = ranks // 2
    links = dict.fromkeys(combinations(range(half), 2), 1)
    links |= dict.fromkeys(combinations(range(half, ranks), 2), 1)
    if joined == 4:
        del links[0, 1], links[half, half + 1]
    return links | {(i, half + i): 1 for i in range(joined)}


def _edges(ring: list[int]) -> Iterator[Pair]:
    """The pairs of neighbours round a ring, the smaller one first."""
    return ((min(a, b), max(a, b)) for a, b in edges_of(ring))


def _judge(case: Case, outcome: Outcome) -> Verdict:
    value, (ranks, links) = outcome.values[0], case.args[0]
    if not case.facts["solvable"]:
        return Verdict(value is None, f"returned {value!r:.80}", "None", evidence="rings")
    wanted = "two rings over all ranks, no wire twice"
    if value is None or len(value) != 2:
        return Verdict(False, f"returned {value!r:.80}", wanted, evidence=type(value).__name__)
    used: Counter[Pair] = Counter()
    for number, ring in enumerate(value, 1):
        if sorted(ring) != list(range(ranks)):
            again = len(ring) == ranks + 1 and ring[0] == ring[-1]
            links_of = all(isinstance(rank, (list, tuple)) for rank in ring)
            return Verdict(False, f"ring {number} is {list(ring)}"[:160], wanted, evidence=(
                "links" if links_of else "closed" if again else "not all ranks"))
        for a, b in edges_of(ring):
            if (min(a, b), max(a, b)) not in links:
                return Verdict(False, f"ring {number} goes from {a} to {b}, between which there is "
                               "no link", wanted, evidence=(a, b) == (ring[-1], ring[0]))
        used.update(_edges(list(ring)))
    over = next((pair for pair, times in used.items() if times > links[pair]), None)
    return Verdict(over is None, "two rings" if over is None else
                   f"both rings use the link {over}, which has one wire", wanted,
                   evidence="one wire")


def greedy_fails(ranks: int, links: Links) -> bool:
    """Do the wires that the first ring, in the order of ranks, leaves hold no second ring?"""
    first = _first_ring(ranks, links)
    remaining = links | {pair: links[pair] - 1 for pair in _edges(first)}
    return not _first_ring(ranks, {pair: wires for pair, wires in remaining.items() if wires})


def _first_ring(ranks: int, links: Links, path: Sequence[int] = (0,)) -> list[int]:
    """Return the first ring that begins with `path`; [] if there is none."""
    def joined(a: int, b: int) -> bool:
        return (min(a, b), max(a, b)) in links

    if len(path) == ranks:
        return [*path] if joined(path[-1], path[0]) else []
    rings = (_first_ring(ranks, links, (*path, following)) for following in range(ranks)
             if following not in path and joined(path[-1], following))
    return next(filter(None, rings), [])


def _misleading(ranks: int, seed: int) -> Case:
    """A case on whose mesh greedy search fails: the first ring leaves no second one."""
    draws = ((seed, number) for number in range(1000))
    tries = (_case("misleading mesh", ranks, _two_rings(ranks, ranks // 8, draw), draw)
             for draw in draws)
    return next(c for c in tries if greedy_fails(*c.args[0]))


def _build(seed: int) -> list[Check]:
    easy = [_case("complete mesh", p, _complete(p), seed) for p in (5, 6)]
    easy += [_case("nearly complete mesh", p, _complete(p, p // 2), seed) for p in (7, 8)]
    v100 = [_case("8 V100", 8, dict(V100_LINKS), seed),
            *(_case("double ring", p, _bundled(p), seed) for p in (5, 6))]
    misleading = [_misleading(p, seed) for p in range(6, 13)]
    none = [_case("complete mesh", 4, _complete(4), seed, solvable=False),
            _case("two halves", 10, _halves(10, 2), seed, solvable=False),
            _case("one ring", 5, dict.fromkeys(_edges(list(range(5))), 1), seed, solvable=False)]
    misleading.append(_case("two halves", 10, _halves(10, 4), seed))
    large = [_case("torus 5 × 5", 25, _grid(5, 5), seed),
             _case("mesh", 13, _two_rings(13, 6, seed), seed)]
    return [
        Check("easy meshes", 1, "every rank joined to nearly every other", easy, _judge),
        Check("bundled wires", 1, "8 V100; rings of double links", v100, _judge),
        Check("misleading meshes", 2, "6 to 12 ranks", misleading, _judge),
        Check("no rings", 1, "meshes without two rings", none, _judge, requires=always),
        Check("larger meshes", 1, "13 and 25 ranks", large, _judge),
    ]


EXERCISE = Exercise("find-rings", "Find the rings", "find_rings", _build)
