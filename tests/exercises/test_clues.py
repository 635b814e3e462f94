"""Mistakes that can be made in any exercise: what the first hint says of them."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from functools import cache

import pytest
import torch

from dtlab import Recv, Send, collectives
from dtlab.collectives.registry import IMPLEMENTATIONS
from dtlab.grading.case import CaseFailure
from dtlab.grading.clues import failure_clue
from dtlab.grading.compare import difference, fingerprint
from dtlab.grading.exercise import find_exercise
from dtlab.grading.mistakes import Mistake, answer_of
from dtlab.ps.consistency import SSP
from dtlab.simulator.network import fair_rates
from dtlab.topology import edge_disjoint_cycles
from tests.exercises.answers import SOLUTIONS, first_hint, judged, solution

CLUES = []
PASS_RIGHT, RING = solution("fix-deadlock"), solution("ring-all-reduce")
BROADCAST = solution("binomial-broadcast")


def clue(exercise, points, hint):
    """Add the decorated answer: it earns `points`, and reads `hint` first."""
    def add(answer):
        CLUES.append((exercise, answer, points, hint))
        return answer
    return add


def sides(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# ---- somebody else's work ------------------------------------------------------------------------


@clue("ring-all-reduce", 0, "calls dtlab.collectives.all_reduce, which is the library's own")
def the_librarys_ring(comm, x):
    return collectives.all_reduce(comm, x, algorithm="ring")


@clue("ring-all-reduce", 0, "calls dtlab.collectives.all_reduce, which is the library's own")
def the_librarys_ring_on_a_stream(comm, x):
    return comm.begin(collectives.all_reduce, x, algorithm="ring").wait()


@clue("halving-doubling", 0, "halving_doubling, which is the library's own")
def the_bare_algorithm(comm, x):
    return IMPLEMENTATIONS["all_reduce"]["halving_doubling"](comm, x, "sum")


@clue("hierarchical", 0, "algorithm=hierarchical, which does just what the exercise asks")
def the_forbidden_algorithm(comm, x, group):
    return collectives.all_reduce(comm, x, algorithm="hierarchical", group=group)


@clue("finish-times", 0, "calls dtlab.simulator.network.fair_rates, which is")
def the_simulators_rates(sizes, routes, capacity):
    return list(fair_rates([], list(capacity.values())))


@clue("find-rings", 0, "calls dtlab.topology.cycles.edge_disjoint_cycles, which is")
def the_librarys_rings(ranks, links):
    return edge_disjoint_cycles(None, 2)


@clue("ssp-rule", 0, "calls dtlab.ps.consistency.SSP")
def the_librarys_rule(request, clock, clocks, staleness):
    return SSP(staleness)


# ---- memory that nobody has written --------------------------------------------------------------


@clue("accumulated-average", 0, "Where it is nan, nothing was written")
def sums_that_begin_with_what_was_in_memory(comm, batches, gradient, length):
    total = torch.empty(length + 1, dtype=torch.float64)
    for batch in batches:
        total += torch.cat([len(batch) * gradient(batch), torch.tensor([float(len(batch))])])
    collectives.all_reduce(comm, total, algorithm="ring")
    return total[:-1] / total[-1]


# ---- values that no message brought --------------------------------------------------------------


@clue("ring-all-reduce", 0, "Split is not for sending")
def sums_without_messages(comm, x):
    x.copy_(torch.tensor(comm._all_gather_objects([float(v.real) for v in x])).sum(0))


@clue("fix-deadlock", 0, "Split is not for sending")
def agrees(comm, value):
    return comm._all_gather_objects(value)[(comm.rank - 1) % comm.size]


@clue("ring-all-reduce", 0, "torch.distributed isn't the communicator")
def torchs_own(comm, x):
    torch.distributed.all_reduce(x)


# ---- ends that don't meet ------------------------------------------------------------------------


@clue("ring-all-reduce", 0, "none has sent yet: receiving first")
def receives_first(comm, x):
    comm.recv(torch.empty_like(x), sides(comm)[1])


@clue("fix-deadlock", 0, "use comm.sendrecv")
def sends_first(comm, value):
    comm.send(value, sides(comm)[0])
    return comm.recv_object(sides(comm)[1])


@clue("ring-all-reduce", 0, "Some ranks have returned")
def one_rank_stops_early(comm, x):
    if comm.rank:
        comm.recv(x, comm.rank - 1)


@clue("fix-deadlock", 2, "does the rank that you send to receive from you next")
def only_to_and_from_the_right(comm, value):
    inbox = [value] if comm.size == 1 else []
    if comm.size > 1:
        comm.sendrecv(value, sides(comm)[0], inbox, sides(comm)[0])
    return inbox[0]


@clue("ring-all-reduce", 0, "Call wait() on everything")
def forgets_to_wait(comm, x):
    comm.irecv(torch.empty_like(x), sides(comm)[1])
    comm.send(x, sides(comm)[0])


@clue("shift", 0, "One end sends a tensor and the other receives an object")
def receives_an_object(comm, x):
    inbox = []
    comm.sendrecv(x, sides(comm)[0], inbox, sides(comm)[1])
    return inbox[0]


@clue("fix-deadlock", 0, "There is no such rank")
def forgets_the_remainder(comm, value):
    inbox = []
    comm.sendrecv(value, comm.rank + 1, inbox, comm.rank - 1)
    return inbox[0]


@clue("shift", 0, "Receive into another one")
def in_one_tensor(comm, x):
    comm.sendrecv(x, sides(comm)[0], x, sides(comm)[1])
    return x


@clue("ring-all-reduce", 0, "differs in size")
def sizes_that_do_not_fit(comm, x):
    comm.sendrecv(x, sides(comm)[0], torch.empty(len(x) + 1), sides(comm)[1])


@clue("hierarchical", 0, "comm.split returns None")
def asks_none_for_its_size(comm, x, group):
    team = comm.split(comm.rank // group)
    return comm.split(0 if team.rank == 0 else None).size


# ---- results ------------------------------------------------------------------------------------


@clue("hello-ranks", 0, "returns nothing")
def prints_only(comm):
    print(comm.rank, comm.size)


@clue("hello-ranks", 0, "Return a tuple or a list of 4 things, in this order: rank, size")
def returns_one_of_four(comm):
    return comm.rank


@clue("fix-deadlock", 0, "inbox[0]")
def returns_the_list(comm, value):
    return [PASS_RIGHT(comm, value)]


@clue("ring-all-reduce", 0, "The returned tensor is right, but x itself is unchanged")
def returns_a_new_tensor(comm, x):
    return RING(comm, x.clone())


@clue("binomial-broadcast", 0, "The returned tensor is right, but x itself is unchanged")
def broadcasts_a_new_tensor(comm, x, root):  # the root's x is right all the same
    return BROADCAST(comm, x.clone(), root)


@clue("ring-all-reduce", 0, "x is unchanged on every rank")
def does_nothing(comm, x):
    pass


@clue("ring-all-reduce", 0, "Only rank 0 has the right result")
def sum_on_one_rank(comm, x):
    if comm.rank:
        comm.send(x, 0)
        return
    for other in range(1, comm.size):
        comm.recv(inbox := torch.empty_like(x), other)
        x += inbox


@clue("ring-all-reduce", 0, "is it a mean?")
def averages(comm, x):
    RING(comm, x)
    x /= comm.size


@clue("row-parallel", 0, "in this order: y")
def one_thing(comm, *args):
    return 1


@clue("ring-all-reduce", 0, "gives a tuple")
def adds_to_an_item_of_the_tuple(comm, x):
    chunks = x.tensor_split(comm.size)
    chunks[0] += x[: len(chunks[0])]


@clue("ring-all-reduce", 0, "x.split(m) makes pieces of m elements")
def counts_on_pieces(comm, x):
    return x.split(comm.size)[comm.size]


@clue("ring-all-reduce", 6, "Objects are sent")
def sends_lists(comm, x):
    passing = x.clone()
    for _ in range(comm.size - 1):
        inbox = []
        comm.sendrecv(passing.tolist(), sides(comm)[0], inbox, sides(comm)[1])
        passing = torch.tensor(inbox[0], dtype=x.dtype)
        x += passing


@clue("ring-all-reduce", 0, "Not written yet")
def as_given(comm, x):
    raise NotImplementedError


@clue("shift", 0, "define what the function needs in the solution cell")
def unknown_name(comm, x):
    return helper(x)  # noqa: F821


@clue("surviving-checkpoint", 0, "The answer returned dict, not two functions, save and load")
def a_dictionary_of_functions(disk):
    return {"save": lambda state: iter(()), "load": lambda: None}


@clue("chain-replication", 0, "a generator comes back: return a list")
def yields_messages(node, message):
    yield "client", ("done", message[1])


@clue("one-f-one-b", 0, "for each rank, a list of texts")
def rows_as_texts(p, m):
    return [" ".join(row) for row in solution("one-f-one-b")(p, m)]


@clue("surviving-checkpoint", 7, "torn or damaged is taken for whole")
def only_pickle_notices(disk):
    def numbers():
        return [name for name in disk.names() if name != "new"]

    def save(state):
        data = pickle.dumps(state)
        yield
        disk.write("new", data)
        disk.sync("new")
        disk.rename("new", f"{state['step']:06}")
        for name in numbers()[:-2]:
            disk.remove(name)

    def load():
        for name in reversed(numbers()):
            with contextlib.suppress(Exception):
                return pickle.loads(disk.read(name))
        return None

    return save, load


@clue("efficiency", 6, "other keys than asked for")
def texts_for_keys(times):
    speedup, *others = solution("efficiency")(times)
    return {str(n): s for n, s in speedup.items()}, *others


@clue("efficiency", 6, "the right numbers, rounded")
def rounds_to_two_digits(times):
    speedup, *others = solution("efficiency")(times)
    return {n: round(s, 2) for n, s in speedup.items()}, *others


@clue("vocab-loss", 0, "in another order: return loss, the gradient")
def the_gradient_first(*args):
    return solution("vocab-loss")(*args)[::-1]


@clue("vocab-loss", 0, "Return a tuple or a list of 2 things")
def the_loss_alone(*args):
    return solution("vocab-loss")(*args)[0]


@clue("vocab-loss", 0, "the right numbers, rounded")
def a_loss_in_float32(comm, logits, targets, first):
    loss, gradient = solution("vocab-loss")(comm, logits.float(), targets, first)
    return loss.double(), gradient.double()


@clue("bruck-all-to-all", 0, "A tensor is asked for where list comes back")
def rows_in_a_list(comm, parts):
    return list(solution("bruck-all-to-all")(comm, parts))


@clue("bruck-all-to-all", 0, "Where it is nan, nothing was written")
def its_own_row_is_missing(comm, parts):
    actual, result = solution("bruck-all-to-all")(comm, parts), torch.empty_like(parts)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    result[others] = actual[others]
    return result


@clue("top-k", 0, "divided by the number of ranks once too often")
def a_mean_of_the_mean(comm, *args):
    return solution("top-k")(comm, *args) / comm.size


@clue("top-k", 0, "the right numbers, rounded")
def sends_float32(comm, g, memory, k):
    memory += g
    places = memory.abs().topk(min(k, len(g))).indices
    values, total = memory[places].float(), torch.zeros_like(g)
    memory[places] = 0
    total.index_add_(0, collectives.all_gather(comm, places).flatten(),
                     collectives.all_gather(comm, values).flatten().double())
    return total / comm.size


@clue("find-rings", 0, "a generator comes back: return a list")
def yields_rings(ranks, links):
    yield from solution("find-rings")(ranks, links)


@clue("fix-deadlock", 0, "so a coroutine comes back")
async def passes_asynchronously(comm, value):
    return value


@clue("best-interval", 2, "TypeError: unsupported operand")
def squares_with_a_hat(goal, *args):
    mttf, period, share = solution("best-interval")(goal, *args)
    return mttf, period, share if goal == "least lost time" else share ^ 2


# ---- costs, of an answer in another style than the recorded mistakes -----------------------------


@clue("binomial-broadcast", 8, "One message follows the other")
def flat_in_one_exchange(comm, x, root):
    if comm.rank == root:
        comm.exchange(*(Send(x, rank) for rank in range(comm.size) if rank != root))
    else:
        comm.recv(x, root)


@clue("sharded-store", 5, "Too little goes through the servers")
def worker_to_worker(comm, weights, grads, servers, lr):
    others = [rank for rank in range(servers, comm.size) if rank != comm.rank]
    for key in sorted(grads):
        inboxes = [torch.empty_like(grads[key]) for _ in others]
        comm.exchange(*(Send(grads[key], rank) for rank in others),
                      *(Recv(inbox, rank) for inbox, rank in zip(inboxes, others, strict=True)))
        weights[key] -= lr * sum(inboxes, grads[key]) / (comm.size - servers)
    return weights


@clue("chain-replication", 0, '("value", number, value) to a read')
def reads_are_done(node, message):
    if message[0] == "read":
        return [("client", ("done", message[1]))]
    return solution("chain-replication")(node, message)


report_on = cache(judged)


@pytest.mark.parametrize(("exercise", "answer", "points", "hint"), CLUES,
                         ids=[answer.__name__ for _, answer, *_ in CLUES])
def test_the_first_hint_names_the_mistake(exercise, answer, points, hint):
    report = report_on(exercise, answer)
    assert report.points == points, str(report)
    assert hint in first_hint(report), str(report)
    assert "works in the simulator" not in " ".join(report.hints)  # all of these fail there, too


def test_a_deadlock_comes_with_the_table_and_the_learners_line():
    report = judged("fix-deadlock", sends_first)
    assert "rank  doing  with" in report.details
    assert "in sends_first" in report.details
    assert "deadlock" in report.rows[0].actual


def test_a_call_that_fails_is_not_said_to_fail_in_a_line_of_the_graders():
    (actual, *_) = [row.actual for row in judged("hello-ranks", lambda: None).rows]
    assert actual.endswith("takes 0 positional arguments but 1 was given")


def test_a_row_that_fails_after_another_gets_no_usual_hint():
    def without_padding(comm, weights, grad, state, lr, mu):
        mean = collectives.reduce_scatter(comm, grad.view(comm.size, -1), "avg")
        state["v"] = mu * state.get("v", 0) + mean
        shard = weights.view(comm.size, -1)[comm.rank] - lr * state["v"]
        return weights.copy_(collectives.all_gather(comm, shard).flatten())

    report = judged("zero-stage-1", without_padding)
    assert [row.name for row in report.rows if row.hint] == ["any length"], str(report)


def test_bytes_that_are_kept_are_not_taken_for_bytes_that_are_sent():
    step = solution("zero-stage-1")

    def keeps_the_gradient(comm, weights, grad, state, lr, mu):
        state["grad"] = grad
        return step(comm, weights, grad, state, lr, mu)

    assert "shard of the momentum" in first_hint(judged("zero-stage-1", keeps_the_gradient))


def test_bytes_and_rounds_stand_in_the_table_against_their_bounds():
    rows = {row.name: row for row in report_on("ring-all-reduce", sends_lists).rows}
    assert rows["bytes"].nbytes.endswith(" / 48")  # p = 4: 6 steps of 2 float32 would do
    assert rows["rounds"].rounds.split(" / ")[1] == "24"  # p = 13


def test_a_number_that_no_float_holds_has_a_fingerprint():
    assert fingerprint([10**5000]) == fingerprint([float("inf")]) != fingerprint([1])


def test_what_is_right_but_for_a_number_is_not_right_in_another_order():
    def beyond_the_circle(comm):
        left = comm.rank - 1 if comm.rank else comm.size
        return comm.rank, comm.size, left, comm.rank + 1 if comm.rank < comm.size - 1 else comm.size

    hints = judged("hello-ranks", beyond_the_circle).hints
    assert not any("another order" in hint for hint in hints), hints


def test_no_later_hint_is_of_a_mistake_that_an_earlier_row_rules_out():
    def sends_its_own_chunk(comm, x):  # and never what has come
        p, me = comm.size, comm.rank
        chunks, inbox = x.tensor_split(p), torch.empty_like(x.tensor_split(p)[0])
        for step in range(p - 1):
            arriving = chunks[(me - step - 1) % p]
            comm.sendrecv(chunks[me], (me + 1) % p, inbox[: len(arriving)], (me - 1) % p)
            arriving += inbox[: len(arriving)]
        for step in range(p - 1):
            comm.sendrecv(chunks[(me + 1 - step) % p], (me + 1) % p, chunks[(me - step) % p],
                          (me - 1) % p)
        return x

    _, *later = judged("ring-all-reduce", sends_its_own_chunk).hints
    assert [hint.partition(".")[0] for hint in later] == [
        "What one rank sends differs in size from what the other receives into"]

    def never_closes(ranks, links):
        left, rings = dict(links), []
        for _ in range(2):
            ring = [0]
            while len(ring) < ranks:
                here = ring[-1]
                ring += [b for b in range(ranks) if b not in ring
                         and left.get((min(here, b), max(here, b)))][:1] or [None]
                if ring[-1] is None:
                    return None
            for a, b in itertools.pairwise(ring):
                left[min(a, b), max(a, b)] -= 1
            rings.append(ring)
        return rings

    report = judged("find-rings", never_closes)
    assert not any("None comes back, even where every rank" in hint for hint in report.hints)


@pytest.mark.parametrize(("exercise", "changed", "said"), [
    ("hello-ranks", {"(comm.rank + 1)": "(comm.rank + 1000)"}, "in another order"),
    ("shift", "def shift(comm, x):\n    own, other = x.clone(), torch.empty_like(x)\n"
     "    comm.sendrecv(own, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)\n"
     "    x.copy_(other)\n    return own", "in another order"),
    ("finish-times", {"return ends": "return [ends]"}, "received"),
    ("fix-deadlock", {"return inbox[0]": "return 0"}, "Return a list"),
    ("place-job", {"[:ranks]": "[ranks:]"}, "not of racks"),
    ("binomial-broadcast", {"distance *= 2": "distance *= 1000"}, "powers of two"),
    ("ring-all-reduce", {"(me - step - 1)": "(me - step + 1)"}, "sends to its left"),
], ids=lambda each: each if isinstance(each, str) and "\n" not in each else "")
def test_a_hint_says_nothing_that_is_false(exercise, changed, said):
    answer = answer_of(Mistake(changed, ""), find_exercise(exercise), SOLUTIONS)
    report = judged(exercise, answer)
    assert not report.passed
    assert said not in " ".join(report.hints), str(report)


def test_a_high_loss_alone_names_no_mistake():
    def by_the_amount_of_g(request, worker, w, g, backups, lr, lam):
        if request == "pull":
            backups[worker] = w.clone()
        else:
            w -= lr * (g + lam * g.abs() * (w - backups[worker]))
        return w

    report = judged("dc-asgd", by_the_amount_of_g)
    assert "loss under delay" in [row.name for row in report.rows if not row.passed]
    assert not any("One backup for all" in hint for hint in report.hints), str(report)


def test_a_crash_over_gloo_is_not_said_to_be_a_call_of_exit():
    assert failure_clue(CaseFailure("died", 2, message="signal SIGABRT")).startswith(
        "A rank's process crashed")
    assert "Don't call exit" in failure_clue(CaseFailure("died", 2, message="exit code 3"))


def test_a_short_list_that_is_wanted_is_shown_and_a_long_one_counted():
    assert difference("result", 0, [114, None]) == ("result returned 0", "[114, None]")
    assert difference("result", 0, [*range(100)]) == ("result returned 0", "100 values")
