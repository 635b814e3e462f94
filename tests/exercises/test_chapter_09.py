"""Right and wrong answers to the exercises of chapter 09."""

from __future__ import annotations

import bisect
import hashlib
import random

import pytest

from dtlab.grading.exercises import _chain_game as game
from dtlab.grading.exercises import chain_replication as chain
from tests.exercises.answers import first_hint, judged, lost, solutions

CRASHES = {"head dies", "middle dies", "tail dies", "two die"}
CHAIN = {"no crash", "asked again", "letters"} | CRASHES


# ---- chain-replication -------------------------------------------------------------------------


def value(node, letter):
    return [("client", ("value", letter[1], node["values"].get(letter[2], 0)))]


def apply(node, letter):
    """Add, unless it has been added before."""
    had = node.setdefault("had", set())
    if letter[1] not in had:
        had.add(letter[1])
        node["values"][letter[2]] = node["values"].get(letter[2], 0) + letter[3]


def around(node):
    """The nodes before and after this one, or None."""
    place = node["chain"].index(node["me"])
    ends = [None, *node["chain"], None]
    return ends[place], ends[place + 2]


def on(node, letter, keep=True, ack=True, answer="tail", dedupe=True, resend=True):
    """Chain replication with everything that can go wrong in it as an option."""
    what, number = letter[0], letter[1]
    kept = node.setdefault("kept", {})
    if what == "read":
        return value(node, letter)
    if what == "ack":
        kept.pop(number, None)
        before, _ = around(node)
        return [] if before is None else [(before, letter)]
    if what == "chain":
        node["chain"] = number
        waiting = list(kept.values()) if resend else []
        return [out for one in waiting for out in handed_on(node, one, keep, ack, answer)]
    if dedupe:
        apply(node, letter)
    else:
        node["values"][letter[2]] = node["values"].get(letter[2], 0) + letter[3]
    return handed_on(node, letter, keep, ack, answer)


def handed_on(node, letter, keep, ack, answer):
    before, after = around(node)
    kept = node["kept"]
    sent = []
    if (answer == "tail" and after is None) or (answer == "head" and before is None):
        sent.append(("client", ("done", letter[1])))
    if after is not None:
        if keep:
            kept[letter[1]] = letter
        sent.append((after, letter))
    else:
        kept.pop(letter[1], None)
        if ack and before is not None:
            sent.append((before, ("ack", letter[1])))
    return sent


def by_places(node, letter):  # right as well: a log, positions, one cumulative acknowledgement
    log, last = node.setdefault("log", []), node.setdefault("numbers", set())
    node.setdefault("stable", 0)
    if letter[0] == "read":
        return value(node, letter)
    if letter[0] == "chain":
        node["chain"] = letter[1]
        _, after = around(node)
        if after is not None:
            return [(after, ("op", place, log[place]))
                    for place in range(node["stable"], len(log))]
        pending = range(node["stable"], len(log))
        node["stable"] = len(log)
        before, _ = around(node)
        return [("client", ("done", log[place][1])) for place in pending] + (
            [] if before is None else [(before, ("upto", len(log)))])
    if letter[0] == "upto":
        node["stable"] = max(node["stable"], letter[1])
        before, _ = around(node)
        return [] if before is None else [(before, letter)]
    place, request = (None, letter) if letter[0] == "add" else letter[1:]
    before, after = around(node)
    if request[1] not in last:
        last.add(request[1])
        log.append(request)
        node["values"][request[2]] = node["values"].get(request[2], 0) + request[3]
    if after is not None:
        return [(after, ("op", len(log) - 1, request))]
    node["stable"] = len(log)
    return [("client", ("done", request[1]))] + (
        [] if before is None else [(before, ("upto", len(log)))])


def step_by_step(node, letter):  # right as well: a letter that comes again goes down once more
    return on(node, letter)


def acknowledges_at_the_head(node, letter):
    return on(node, letter, answer="head")


def tail_does_not_answer(node, letter):
    return on(node, letter, answer="nobody")


def tail_does_not_tell_those_before(node, letter):
    return on(node, letter, ack=False)


def keeps_nothing(node, letter):
    return on(node, letter, keep=False)


def keeps_but_sends_nothing_again(node, letter):
    return on(node, letter, resend=False)


def carries_out_twice(node, letter):
    return on(node, letter, dedupe=False)


def tells_those_before_and_then_the_client(node, letter):
    """In between it may die; and what comes again is not answered once more."""
    if letter[0] == "add" and letter[1] in node.get("had", ()):
        return []
    return sorted(on(node, letter), key=lambda out: out[0] == "client")


def deaf_to_the_master(node, letter):
    return [] if letter[0] == "chain" else on(node, letter)


def leader_tells_all(node, letter):
    """The head sends to everyone and answers at once: no chain."""
    if letter[0] != "add":
        return [] if letter[0] == "chain" else on(node, letter)
    apply(node, letter)
    if node["me"] != node["chain"][0]:
        return []
    return [("client", ("done", letter[1])), *((n, letter) for n in node["chain"][1:])]


def returns_nothing(node, letter):
    on(node, letter)


def answers_for_ever(node, letter):
    return [*on(node, letter), (node["me"], ("ack", letter[1]))]


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (acknowledges_at_the_head, CHAIN, "must be the last to have"),
    (tail_does_not_answer, CHAIN, "never comes"),
    (tail_does_not_tell_those_before, {"letters"}, "travel back up the chain"),
    (keeps_nothing, {"middle dies", "two die"}, "keeps what it has passed on"),
    (keeps_but_sends_nothing_again, {"middle dies", "two die"}, "keeps what it has passed on"),
    (carries_out_twice, {"asked again"} | CRASHES, "remember the numbers"),
    (tells_those_before_and_then_the_client, {"tail dies", "two die"}, "tail answers every add"),
    (deaf_to_the_master, CRASHES - {"head dies"}, "when the chain changes"),
    (leader_tells_all, CHAIN, "must be the last to have"),
    (returns_nothing, CHAIN, ""),
    (answers_for_ever, CHAIN, "letters never end"),
], ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("seed", [0, 2])
def test_chain_replication(answer, rows, hint, seed):
    report = judged("chain-replication", answer, seed)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("answer", [by_places, step_by_step], ids=lambda v: v.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_different_right_chains_get_all_points(answer, seed):
    report = judged("chain-replication", answer, seed)
    assert report.points == report.max_points == 10, str(report)


def test_a_crash_changes_nothing_before_it():
    """So the moments of a calm run are the moments at which a node could have died."""
    calm = game.Game(on, 3, 5).play()
    for crash in game.points(calm, 1):
        run = game.Game(on, 3, 5, [crash]).play()
        assert run.handled[1] == calm.handled[1][: crash.event + 1]


def test_every_moment_of_every_node_is_tried():
    counts = [len(chain.play_crashes(on, 3, node, [7])) for node in range(3)]
    calm = game.Game(on, 3, 7).play()
    assert counts == [sum(max(sent, 1) for sent in calm.handled[node]) for node in range(3)]
    assert min(counts) > game.ADDS


def test_the_answer_of_the_chapters_exercise_is_what_the_client_sees():
    """An add is 4 to its number: two of the same show as a digit 2."""
    client = game.Game(lambda node, letter: on(node, letter, dedupe=False), 3, 1, again=True).play()
    assert any(value // 4**place % 4 == 2 for value, _, _ in client.client.reads
               for place in range(game.ADDS))


# ---- consistent-hashing ------------------------------------------------------------------------

RING = {"a placement", "copies", "balance", "a server comes", "a server dies",
        "everywhere the same"}
MOVES = {"a server comes", "a server dies"}


def stable(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def on_a_ring(keys, servers, copies, vnodes=150, hashed=stable, distinct=True):
    points = sorted((hashed(f"{server}/{v}"), server) for server in servers for v in range(vnodes))
    placed = {}
    for key in keys:
        start = bisect.bisect(points, (hashed(key),))
        mine = []
        for step in range(len(points)):
            server = points[(start + step) % len(points)][1]
            if server not in mine or not distinct:
                mine.append(server)
            if len(mine) == min(copies, len(servers)):
                break
        placed[key] = mine
    return placed


def by_weight(keys, servers, copies):  # right as well: rendezvous hashing, no ring at all
    return {key: sorted(servers, key=lambda s: stable(f"{s} {key}"), reverse=True)[:copies]
            for key in keys}


def hash_mod_n(keys, servers, copies):
    ordered = sorted(servers)
    return {key: [ordered[(stable(key) + c) % len(ordered)]
                  for c in range(min(copies, len(servers)))] for key in keys}


def pythons_own_hash(keys, servers, copies):
    return on_a_ring(keys, servers, copies, hashed=lambda text: hash(text))


def no_virtual_nodes(keys, servers, copies):
    return on_a_ring(keys, servers, copies, vnodes=1)


def copies_on_one_server(keys, servers, copies):
    return on_a_ring(keys, servers, copies, distinct=False)


def copies_in_order_of_names(keys, servers, copies):
    ordered = sorted(servers)
    placed = on_a_ring(keys, servers, 1)
    for key, (first,) in placed.items():
        at = ordered.index(first)
        placed[key] = [ordered[(at + c) % len(ordered)] for c in range(min(copies, len(ordered)))]
    return placed


def points_by_place_in_the_list(keys, servers, copies):
    names = {f"{place}": server for place, server in enumerate(servers)}
    return {key: [names[s] for s in mine]
            for key, mine in on_a_ring(keys, list(names), copies).items()}


def in_blocks(keys, servers, copies):
    return {key: [servers[i * len(servers) // len(keys)]] for i, key in enumerate(keys)}


def one_server_not_a_list(keys, servers, copies):
    return {key: mine[0] for key, mine in on_a_ring(keys, servers, copies).items()}


def at_random(keys, servers, copies):
    return {key: random.sample(servers, min(copies, len(servers))) for key in keys}


def forgets_copies(keys, servers, copies):
    return on_a_ring(keys, servers, 1)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (hash_mod_n, MOVES, "no count of servers"),
    (pythons_own_hash, {"everywhere the same"}, "differs from process to process"),
    (no_virtual_nodes, {"balance"} | MOVES, "many times"),
    (copies_on_one_server, {"copies", "a server dies", "everywhere the same"}, "die together"),
    (copies_in_order_of_names, {"a server dies"}, "next different servers round the ring"),
    (points_by_place_in_the_list, {"a server dies", "everywhere the same"}, "place in the list"),
    (in_blocks, RING - {"a placement", "balance"}, "Each key is on `copies` servers"),
    (one_server_not_a_list, RING, "a *list* of servers"),
    (at_random, MOVES | {"everywhere the same"}, "no count of servers"),
    (forgets_copies, {"copies", "a server dies", "everywhere the same"}, "on `copies` servers"),
], ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("seed", [0, 2])
def test_consistent_hashing(answer, rows, hint, seed):
    report = judged("consistent-hashing", answer, seed)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("answer", [on_a_ring, by_weight], ids=lambda v: v.__name__)
@pytest.mark.parametrize("seed", range(6))
def test_different_right_placements_get_all_points(answer, seed):
    report = judged("consistent-hashing", answer, seed)
    assert report.points == report.max_points == 10, str(report)


@pytest.mark.parametrize(("exercise", "function"), [
    ("chain-replication", "chain_node"), ("consistent-hashing", "place_keys")])
@pytest.mark.parametrize("seed", [0, 2])
def test_the_solution_gets_all_points(exercise, function, seed):
    report = judged(exercise, solutions()[function], seed)
    assert report.points == report.max_points == 10, str(report)
    assert first_hint(report) == ""
