"""Wrong answers to the exercises of chapter 06, and right ones in other styles."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtlab.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from dtlab.grading.exercise import find_exercise
from dtlab.grading.exercises.find_rings import greedy_fails
from tests.exercises.answers import first_hint, judged, lost, solutions

SUMS = {"sums", "any groups", "any n", "any dtype", "slow links", "time", "rounds", "real"}
MESHES = {"easy meshes", "bundled wires", "misleading meshes", "no rings", "larger meshes"}


# ---- hierarchical ------------------------------------------------------------------------------


def teams(comm, group):
    team = comm.split(comm.rank // group)
    return team, comm.split(0 if team.rank == 0 else None)


def by_hand(comm, x, group):  # right, without any collective
    first = comm.rank - comm.rank % group
    place, count = comm.rank - first, comm.size // group
    pieces = x.tensor_split(group)
    right, left = first + (place + 1) % group, first + (place - 1) % group
    for step in range(group - 1):
        arriving = pieces[(place - step - 1) % group]
        inbox = torch.empty_like(arriving)
        comm.sendrecv(pieces[(place - step) % group], right, inbox, left)
        arriving += inbox
    mine = pieces[(place + 1) % group]  # complete in this group; now across, piece by piece
    parts = mine.tensor_split(count)
    me = comm.rank // group
    up, down = (comm.rank + group) % comm.size, (comm.rank - group) % comm.size
    for step in range(count - 1):
        arriving = parts[(me - step - 1) % count]
        inbox = torch.empty_like(arriving)
        comm.sendrecv(parts[(me - step) % count], up, inbox, down)
        arriving += inbox
    for step in range(count - 1):
        comm.sendrecv(parts[(me + 1 - step) % count], up, parts[(me - step) % count], down)
    for step in range(group - 1):
        comm.sendrecv(pieces[(place + 1 - step) % group], right, pieces[(place - step) % group],
                      left)
    return x


def leaders_by_hand(comm, x, group):  # right as well: the leader gathers pieces
    team, leaders = teams(comm, group)
    padded = torch.zeros(-(-len(x) // group) * group, dtype=x.dtype)
    padded[: len(x)] = x
    piece = reduce_scatter(team, padded.view(group, -1))
    if team.rank:
        team.send(piece, 0)
        team.recv(piece, 0)
    else:
        pieces = [piece, *(torch.empty_like(piece) for _ in range(group - 1))]
        for other in range(1, group):
            team.recv(pieces[other], other)
        whole = torch.cat(pieces)
        all_reduce(leaders, whole, algorithm="ring")
        for other in range(1, group):
            team.send(whole.view(group, -1)[other].contiguous(), other)
        piece = whole.view(group, -1)[0].contiguous()
    x.copy_(all_gather(team, piece).view(-1)[: len(x)])
    return x


def one_ring(comm, x, group):
    return all_reduce(comm, x, algorithm="ring")


def plain_trees(comm, x, group):
    team, leaders = teams(comm, group)
    reduce(team, x, algorithm="binomial")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="ring")
    return broadcast(team, x, algorithm="binomial")


def no_way_back(comm, x, group):
    team, leaders = teams(comm, group)
    reduce(team, x, algorithm="rabenseifner")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="ring")
    return x


def own_group_only(comm, x, group):
    return all_reduce(comm.split(comm.rank // group), x, algorithm="ring")


def tree_of_leaders(comm, x, group):
    team, leaders = teams(comm, group)
    reduce(team, x, algorithm="rabenseifner")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="tree")
    return broadcast(team, x, algorithm="scatter_allgather")


def leaders_by_doubling(comm, x, group):
    team, leaders = teams(comm, group)
    reduce(team, x, algorithm="rabenseifner")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="recursive_doubling")
    return broadcast(team, x, algorithm="scatter_allgather")


def everyone_crosses(comm, x, group):
    all_reduce(comm.split(comm.rank // group), x, algorithm="ring")
    return all_reduce(comm.split(comm.rank % group), x, algorithm="ring")


def all_others_form_a_ring_too(comm, x, group):
    team = comm.split(comm.rank // group)
    across = comm.split(0 if team.rank == 0 else 1)
    reduce(team, x, algorithm="rabenseifner")
    all_reduce(across, x, algorithm="ring")
    return broadcast(team, x, algorithm="scatter_allgather")


def in_teams(comm, x, team, leaders, root=0):
    reduce(team, x, root, algorithm="rabenseifner")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="ring")
    return broadcast(team, x, root, algorithm="scatter_allgather")


def only_leaders_split(comm, x, group):
    team = comm.split(comm.rank // group)
    return in_teams(comm, x, team, None if team.rank else comm.split(0))


def uses_none(comm, x, group):
    team, leaders = teams(comm, group)
    reduce(team, x)
    all_reduce(leaders, x)
    return broadcast(team, x)


def asks_none_for_its_size(comm, x, group):
    team, leaders = teams(comm, group)
    return in_teams(comm, x, team, leaders if leaders.size > 1 else None)


def roots_numbered_in_the_whole(comm, x, group):
    return in_teams(comm, x, *teams(comm, group), root=comm.rank // group * group)


def interleaved(comm, x, group):
    team = comm.split(comm.rank % (comm.size // group))
    return in_teams(comm, x, team, comm.split(None if team.rank else 0))


def everyone_among_the_leaders(comm, x, group):
    return in_teams(comm, x, comm.split(comm.rank // group), comm)


def always_pairs(comm, x, group):
    return solutions()["hierarchical_all_reduce"](comm, x, 2 if comm.size % 2 == 0 else 1)


def adds_on_the_way_back(comm, x, group):
    team, leaders = teams(comm, group)
    mine = x.clone()
    reduce(team, x, algorithm="rabenseifner")
    if leaders is not None:
        all_reduce(leaders, x, algorithm="ring")
    else:
        x.copy_(mine)
    total = x.clone()
    broadcast(team, total, algorithm="scatter_allgather")
    return x.copy_(total) if team.rank == 0 else x.add_(total)


def cuts_evenly(comm, x, group):
    even = x[: len(x) // group * group]
    return solutions()["hierarchical_all_reduce"](comm, even, group)


def returns_a_new_one(comm, x, group):
    return solutions()["hierarchical_all_reduce"](comm, x.clone(), group)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (one_ring, {"slow links", "rounds"}, "what one ring over all ranks puts there"),
    (plain_trees, {"time"}, "whole vectors travel"),
    (no_way_back, SUMS, "Only the leaders hold the sum"),
    (own_group_only, SUMS, "its own group only"),
    (tree_of_leaders, {"slow links", "time"}, "One rack's way to the spine carries more"),
    (leaders_by_doubling, {"slow links", "time"}, "In a ring of leaders, all send equally much"),
    (everyone_crosses, {"slow links", "time"}, "k times too much"),
    (all_others_form_a_ring_too, {"slow links", "time", "rounds"}, "every rank but the leaders"),
    (only_leaders_split, SUMS, "which all ranks of comm must call"),
    (uses_none, SUMS, "comm.split returns None"),
    (asks_none_for_its_size, SUMS, "comm.split returns None"),
    (roots_numbered_in_the_whole, SUMS, "numbered anew, from 0"),
    (interleaved, {"slow links", "time"}, "rank r belongs to group r // group"),
    (everyone_among_the_leaders, SUMS, "only the leaders' sums are added up"),
    (adds_on_the_way_back, SUMS, "too large"),
    (cuts_evenly, {"any n"}, "tensor_split(k)"),
    (returns_a_new_one, SUMS, "x itself is unchanged"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_hierarchical(answer, rows, hint):
    report = judged("hierarchical", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


def test_one_mistake_in_three_rows_has_one_hint():
    assert len(judged("hierarchical", all_others_form_a_ring_too).hints) == 1


def test_groups_of_another_size_than_asked_for_cost_bytes_on_the_slow_links():
    report = judged("hierarchical", always_pairs)
    assert {"slow links", "rounds"} <= lost(report), str(report)
    assert not {"sums", "any groups", "any n", "any dtype", "real"} & lost(report)


# ---- find-rings --------------------------------------------------------------------------------


def neighbours_of(ranks, links):
    near = {rank: [] for rank in range(ranks)}
    for a, b in links:
        near[a].append(b)
        near[b].append(a)
    return {rank: sorted(others) for rank, others in near.items()}


def wires(ring):
    return [(min(a, b), max(a, b)) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]


def search(ranks, links, path=(0,)):
    """All rings that begin with `path`, in the order of the ranks' numbers."""
    near = neighbours_of(ranks, links)
    if len(path) == ranks:
        if path[0] in near[path[-1]]:
            yield list(path)
        return
    for following in near[path[-1]]:
        if following not in path:
            yield from search(ranks, links, (*path, following))


def without(links, ring):
    left = dict(links)
    for pair in wires(ring):
        left[pair] -= 1
    return {pair: count for pair, count in left.items() if count > 0}


def with_networkx(ranks, links):  # right, in another style: fewest ways first, links in a graph
    import networkx as nx

    def rings(graph, path):
        if len(path) == ranks:
            if graph.has_edge(path[-1], path[0]):
                yield path
            return
        for b in sorted(set(graph[path[-1]]) - set(path), key=graph.degree):
            yield from rings(graph, [*path, b])

    def graph_of(links):
        graph = nx.Graph(list(links))
        graph.add_nodes_from(range(ranks))
        return graph

    for first in rings(graph_of(links), [0]):
        for second in rings(graph_of(without(links, first)), [0]):
            return first, second
    return None


def greedy(ranks, links):
    first = next(search(ranks, links), None)
    second = first and next(search(ranks, without(links, first)), None)
    return [first, second] if second else None


def there_and_back(ranks, links):
    first = next(search(ranks, links), None)
    return [first, first[::-1]]


def never_none(ranks, links):
    found = solutions()["find_rings"](ranks, links)
    return found or [list(range(ranks)), list(range(ranks))]


def one_wire_a_link(ranks, links):
    return solutions()["find_rings"](ranks, dict.fromkeys(links, 1))


def closes_twice(ranks, links):
    found = solutions()["find_rings"](ranks, links)
    return found and [ring + ring[:1] for ring in found]


def open_paths(ranks, links):
    near = neighbours_of(ranks, links)

    def walk(path, used):
        if len(path) == ranks:
            return path
        for b in near[path[-1]]:
            if b not in path and (min(b, path[-1]), max(b, path[-1])) not in used:
                done = walk([*path, b], used)
                if done:
                    return done
        return None

    first = walk([0], set())
    second = first and walk([0], set(wires(first)[:-1]))
    return [first, second] if second else None


def one_only(ranks, links):
    return next(search(ranks, links), None)


def gives_up(ranks, links):
    return solutions()["find_rings"](ranks, links) if ranks < 9 else None


def all_orders(ranks, links):
    rings = ([0, *rest] for rest in itertools.permutations(range(1, ranks)))
    for first in rings:
        if all(pair in links for pair in wires(first)):
            left = without(links, first)
            for rest in itertools.permutations(range(1, ranks)):
                if all(pair in left for pair in wires([0, *rest])):
                    return [first, [0, *rest]]
    return None


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (greedy, {"misleading meshes"}, "take the first one back"),
    (there_and_back, MESHES, "Take the first ring's wires away"),
    (never_none, {"no rings"}, "so the answer is None"),
    (one_wire_a_link, {"bundled wires"}, "count wires"),
    (closes_twice, MESHES - {"no rings"}, "Name the first rank once"),
    (one_only, MESHES, "Return two lists"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_find_rings(answer, rows, hint):
    report = judged("find-rings", answer)
    slow = {"larger meshes"} if answer in (greedy, there_and_back, one_only) else set()
    assert lost(report) | slow == rows | slow, str(report)  # a search may be lucky, or too slow
    assert hint in first_hint(report)


def test_a_wrong_none_on_a_large_mesh_has_the_hint_of_the_small_ones():
    report = judged("find-rings", gives_up)
    assert lost(report) == {"misleading meshes", "larger meshes"}, str(report)
    assert len(report.hints) == 1
    assert "take the first one back" in first_hint(report)


def test_paths_are_no_rings():
    report = judged("find-rings", open_paths)
    assert "bundled wires" in lost(report)
    assert any("last rank must have a link to the first" in hint or "wires away" in hint
               for hint in report.hints), str(report)


@pytest.mark.slow
def test_trying_all_orders_takes_too_long():
    report = judged("find-rings", all_orders)
    assert {"easy meshes"} & lost(report) == set()
    assert "larger meshes" in lost(report), str(report)


@pytest.mark.parametrize("seed", range(5))
def test_some_meshes_mislead_and_all_have_the_rings_they_should(seed):
    checks = {check.name: check for check in find_exercise("find-rings").build(seed)}
    for case in checks["misleading meshes"].cases:
        ranks, links = case.args[0]
        assert greedy_fails(ranks, links)
        assert greedy(ranks, links) is None
        assert solutions()["find_rings"](ranks, links)
    for case in checks["no rings"].cases:
        assert with_networkx(*case.args[0]) is None


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("exercise", "answer", "points"), [
    ("hierarchical", by_hand, 10), ("hierarchical", leaders_by_hand, 10),
    ("find-rings", with_networkx, 6),
], ids=lambda v: getattr(v, "__name__", str(v)))
def test_right_answers_get_all_points_whatever_their_style(exercise, answer, points, seed):
    report = judged(exercise, answer, seed)
    assert report.points == report.max_points == points, str(report)
    assert first_hint(report) == ""
