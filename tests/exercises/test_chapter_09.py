"""Right and wrong answers to the exercises of chapter 09."""

from __future__ import annotations

import bisect
import hashlib
import random
import sys
from functools import partial

import pytest

from dtlab.grading.exercises import _chain_run as chain_run
from dtlab.grading.exercises import chain_replication as chain
from dtlab.grading.exercises import consistent_hashing as hashing
from tests.exercises.answers import first_hint, judged, lost

CRASHES = {"head dies", "middle dies", "tail dies", "two die"}
CHAIN = {"no crash", "asked again", "messages"} | CRASHES


# ---- chain-replication -------------------------------------------------------------------------


def value(node, message):
    return [("client", ("value", message[1], node["values"].get(message[2], 0)))]


def apply(node, message):
    """Add, unless it has been added before."""
    had = node.setdefault("had", set())
    if message[1] not in had:
        had.add(message[1])
        node["values"][message[2]] = node["values"].get(message[2], 0) + message[3]


def around(node):
    """The nodes before and after this one, or None."""
    place = node["chain"].index(node["me"])
    ends = [None, *node["chain"], None]
    return ends[place], ends[place + 2]


def on(node, message, keep=True, ack=True, answer="tail", dedupe=True, resend=True):
    """Chain replication with everything that can go wrong in it as an option."""
    what, number = message[0], message[1]
    kept = node.setdefault("kept", {})
    if what == "read":
        return value(node, message)
    if what == "ack":
        kept.pop(number, None)
        before, _ = around(node)
        return [] if before is None else [(before, message)]
    if what == "chain":
        node["chain"] = number
        waiting = list(kept.values()) if resend else []
        return [out for one in waiting for out in handed_on(node, one, keep, ack, answer)]
    if dedupe:
        apply(node, message)
    else:
        node["values"][message[2]] = node["values"].get(message[2], 0) + message[3]
    return handed_on(node, message, keep, ack, answer)


def handed_on(node, message, keep, ack, answer):
    before, after = around(node)
    kept = node["kept"]
    sent = []
    if (answer == "tail" and after is None) or (answer == "head" and before is None):
        sent.append(("client", ("done", message[1])))
    if after is not None:
        if keep:
            kept[message[1]] = message
        sent.append((after, message))
    else:
        kept.pop(message[1], None)
        if ack and before is not None:
            sent.append((before, ("ack", message[1])))
    return sent


def by_places(node, message):  # right as well: a log, positions, one cumulative acknowledgement
    log, last = node.setdefault("log", []), node.setdefault("numbers", set())
    node.setdefault("stable", 0)
    if message[0] == "read":
        return value(node, message)
    if message[0] == "chain":
        node["chain"] = message[1]
        _, after = around(node)
        if after is not None:
            return [(after, ("op", place, log[place]))
                    for place in range(node["stable"], len(log))]
        pending = range(node["stable"], len(log))
        node["stable"] = len(log)
        before, _ = around(node)
        return [("client", ("done", log[place][1])) for place in pending] + (
            [] if before is None else [(before, ("upto", len(log)))])
    if message[0] == "upto":
        node["stable"] = max(node["stable"], message[1])
        before, _ = around(node)
        return [] if before is None else [(before, message)]
    _, request = (None, message) if message[0] == "add" else message[1:]
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


def step_by_step(node, message):  # right as well: a message that comes again goes down once more
    return on(node, message)


def acknowledges_at_the_head(node, message):
    return on(node, message, answer="head")


def tail_does_not_answer(node, message):
    return on(node, message, answer="nobody")


def tail_does_not_tell_those_before(node, message):
    return on(node, message, ack=False)


def keeps_nothing(node, message):
    return on(node, message, keep=False)


def keeps_but_sends_nothing_again(node, message):
    return on(node, message, resend=False)


def carries_out_twice(node, message):
    return on(node, message, dedupe=False)


def tells_those_before_and_then_the_client(node, message):
    """In between it may die; and what comes again is not answered once more."""
    if message[0] == "add" and message[1] in node.get("had", ()):
        return []
    return sorted(on(node, message), key=lambda out: out[0] == "client")


def deaf_to_the_master(node, message):
    return [] if message[0] == "chain" else on(node, message)


def leader_tells_all(node, message):
    """The head sends to everyone and answers at once: no chain."""
    if message[0] != "add":
        return [] if message[0] == "chain" else on(node, message)
    apply(node, message)
    if node["me"] != node["chain"][0]:
        return []
    return [("client", ("done", message[1])), *((n, message) for n in node["chain"][1:])]


def returns_nothing(node, message):
    on(node, message)


def answers_for_ever(node, message):
    return [*on(node, message), (node["me"], ("ack", message[1]))]


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (acknowledges_at_the_head, CHAIN, "must be the last to have"),
    (tail_does_not_answer, CHAIN, "never comes"),
    (tail_does_not_tell_those_before, {"messages"}, "travel back up the chain"),
    (keeps_nothing, {"middle dies", "two die", "messages"}, "keeps what it has passed on"),
    (keeps_but_sends_nothing_again, {"middle dies", "two die", "messages"},
     "keeps what it has passed on"),
    (carries_out_twice, {"asked again"} | CRASHES, "remember the numbers"),
    (tells_those_before_and_then_the_client, {"tail dies", "two die"}, "tail answers every add"),
    (deaf_to_the_master, CRASHES - {"head dies"} | {"messages"}, "when the chain changes"),
    (leader_tells_all, CHAIN, "must be the last to have"),
    (returns_nothing, CHAIN, ""),
    (answers_for_ever, CHAIN, "messages never end"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_chain_replication(answer, rows, hint):
    report = judged("chain-replication", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("answer", [by_places, step_by_step], ids=lambda v: v.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_different_right_chains_get_all_points(answer, seed):
    report = judged("chain-replication", answer, seed)
    assert report.points == report.max_points == 10, str(report)


def test_a_crash_changes_nothing_before_it():
    """So the moments of a calm run are the moments at which a node could have died."""
    calm = chain_run.ChainRun(on, 3, 5).run()
    for crash in chain_run.points(calm, 1):
        run = chain_run.ChainRun(on, 3, 5, [crash]).run()
        assert run.handled[1] == calm.handled[1][: crash.event + 1]


def test_every_moment_of_every_node_is_tried():
    counts = [len(chain.run_crashes(on, 3, node, [7])) for node in range(3)]
    calm = chain_run.ChainRun(on, 3, 7).run()
    assert counts == [sum(max(sent, 1) for sent in calm.handled[node]) for node in range(3)]
    assert min(counts) > chain_run.ADDS


def test_the_answer_of_the_chapters_exercise_is_what_the_client_sees():
    """An add is 4 to its number: two of the same show as a digit 2."""
    twice = partial(on, dedupe=False)
    run = chain_run.ChainRun(twice, 3, 1, again=True).run()
    assert any(value // 4**place % 4 == 2 for value, _, _ in run.client.reads
               for place in range(chain_run.ADDS))


STORE = {}  # of all nodes, which in the check live in one process


def one_memory(node, message):
    """Every node carries out every add at once, in a memory that no crash loses."""
    what, number = message[:2]
    memory = STORE.setdefault("memory", {})
    if number == 1:  # the client's first request: another run
        memory.clear()
    if what == "chain":
        node["chain"] = number
        return []
    if what == "read":
        return [("client", ("value", number,
                            sum(add for key, add in memory.values() if key == message[2])))]
    memory[number] = message[2:]
    return [("client", ("done", number))]


def edits_the_clients_books(node, message):
    """Takes all that the caller knows, and says that everything is well."""
    frame = sys._getframe(1)
    while frame is not None:
        for run in frame.f_locals.values():
            if isinstance(run, chain_run.ChainRun) or type(run).__name__ == "ChainRun":
                run.client.open.clear()
                run.client.reads = [[0, 0, 0]]
        frame = frame.f_back
    return []


@pytest.mark.parametrize(("answer", "most"), [(one_memory, 2), (edits_the_clients_books, 0)],
                         ids=lambda v: getattr(v, "__name__", ""))
def test_a_chain_in_one_memory_and_one_that_edits_the_books_earn_next_to_nothing(answer, most):
    report = judged("chain-replication", answer)
    assert report.points <= most, str(report)


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


LAST = []


def remembers_its_last_call(keys, servers, copies):  # and hashes nothing
    n, ordered, placed = len(servers), sorted(servers), {}
    for i, key in enumerate(sorted(keys)):
        others, shift = ordered[i % n + 1 :] + ordered[: i % n], i // n % max(n - 1, 1)
        placed[key] = [ordered[i % n], *others[shift:], *others[:shift]][:copies]
    if LAST and LAST[-1].keys() == placed.keys():
        before = LAST[-1]
        old = {server for mine in before.values() for server in mine}
        if len(new := set(servers) - old) == 1 and len(old) == n - 1:
            placed = before | {key: list(new) for key in sorted(keys)[::n]}
        elif len(dead := old - set(servers)) == 1 and len(old) == n + 1:
            placed = {key: [s for s in [*mine, *placed[key]] if s not in dead]
                      for key, mine in before.items()}
            placed = {key: list(dict.fromkeys(mine))[:copies] for key, mine in placed.items()}
            for i, mine in enumerate(placed.values()):
                spare = [s for s in ordered[i % n :] + ordered if s not in mine]
                mine += spare[:copies - len(mine)]
    LAST.append(placed)
    return placed


def forgets_copies(keys, servers, copies):
    return on_a_ring(keys, servers, 1)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (hash_mod_n, MOVES, "no count of servers"),
    (pythons_own_hash, {"everywhere the same"}, "differs from process to process"),
    (no_virtual_nodes, {"balance"} | MOVES, "many times"),
    (copies_on_one_server, {"copies", "a server dies", "everywhere the same"}, "die together"),
    (remembers_its_last_call, MOVES, "no count of servers"),
    (copies_in_order_of_names, {"a server dies"}, "next different servers round the ring"),
    (points_by_place_in_the_list, {"a server dies", "everywhere the same"}, "place in the list"),
    (in_blocks, RING - {"a placement", "balance"}, "Each key is on `copies` servers"),
    (one_server_not_a_list, RING, "a *list* of servers"),
    (at_random, MOVES | {"everywhere the same"}, "no count of servers"),
    (forgets_copies, {"copies", "a server dies", "everywhere the same"}, "on `copies` servers"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_consistent_hashing(answer, rows, hint):
    report = judged("consistent-hashing", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_process_places_the_same_keys_twice(seed):
    """So it can't remember where they were: rank r of every case is the same process."""
    placed = set()
    for case in {case for check in hashing.EXERCISE.build(seed) for case in check.cases}:
        for rank, (keys, *_) in enumerate(case.args):
            assert placed.isdisjoint((rank, key) for key in keys)
            placed |= {(rank, key) for key in keys}


@pytest.mark.parametrize("answer", [on_a_ring, by_weight], ids=lambda v: v.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_different_right_placements_get_all_points(answer, seed):
    report = judged("consistent-hashing", answer, seed)
    assert report.points == report.max_points == 10, str(report)
