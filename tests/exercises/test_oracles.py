"""What exercises are judged by: oracles agree with independent ones, and bounds are within reach,
and out of reach of simpler answers, whatever is drawn."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dtlab import ConfigError, simulate
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import find_exercise
from dtlab.grading.exercises import _chain_run as chain_run
from dtlab.grading.exercises import best_segments as segments
from dtlab.grading.exercises import chain_replication as chain
from dtlab.grading.exercises import dc_asgd as compensating
from dtlab.grading.exercises import place_job as placing
from dtlab.grading.exercises import restart_bits, surviving_checkpoint
from dtlab.grading.exercises import ssp_rule as bounding
from dtlab.grading.exercises.find_rings import greedy_fails
from dtlab.grading.mistakes import function_in
from dtlab.ps import BSP, SSP
from dtlab.topology import uniform
from dtlab.trace import Span, Trace
from tests.exercises.answers import judged, solution
from tests.exercises.right_answers import counts_who_is_behind, with_networkx
from tests.ps.test_consistency import diaries


def cases_of(exercise, name, seed):
    (check,) = [c for c in find_exercise(exercise).build(seed) if c.name.startswith(name)]
    return check.cases


@pytest.mark.parametrize("seed", range(5))
def test_some_meshes_mislead_and_all_have_the_rings_they_should(seed):
    for case in cases_of("find-rings", "misleading", seed):
        assert greedy_fails(*case.args[0])
        assert solution("find-rings")(*case.args[0])
    for case in cases_of("find-rings", "no rings", seed):
        assert with_networkx(*case.args[0]) is None


@pytest.mark.parametrize("seed", range(6))
def test_unseen_clusters_need_all_of_the_rule(seed):
    """No flow by itself, and no rates that are worked out once, passes by luck."""
    def alone(sizes, routes, capacity):
        return [n / min(capacity[link] for link in route)
                for n, route in zip(sizes, routes, strict=True)]

    cases = cases_of("finish-times", "unseen", seed)
    wrong = [not np.allclose(alone(*case.args[0]), case.wanted.returns[0], rtol=0.01)
             for case in cases]
    assert sum(wrong) >= 2
    for case in cases:
        assert solution("finish-times")(*case.args[0]) == pytest.approx(case.wanted.returns[0])


@pytest.mark.parametrize("seed", range(6))
def test_half_the_time_of_the_order_offered_is_within_reach_with_room_to_spare(seed):
    for case in [*cases_of("place-job", "time, empty", seed),
                 *cases_of("place-job", "time, busy", seed)]:
        where, ranks = case.facts["cluster"], case.facts["ranks"]
        offered = placing.cost_of(where, where.free[:ranks])
        assert placing.cost_of(where, placing.compact(where, ranks)).elapsed_s < (
            0.8 * offered.elapsed_s / 2)


def test_no_placement_drawn_at_random_puts_fewer_bytes_on_the_spine():
    random, where = np.random.default_rng(0), placing.draw_cluster(3, 4, (2, 1, 0), 0)
    for ranks in (3, 5, 7):
        least = placing.cost_of(where, placing.compact(where, ranks)).spine_bytes
        for _ in range(20):
            drawn = tuple(random.permutation(where.free)[:ranks].tolist())
            assert placing.cost_of(where, drawn).spine_bytes >= 0.99 * least


@pytest.mark.parametrize(("p", "n", "alpha", "beta"), [
    (3, 100_000, 2e-5, 8e-10), (16, 10**8, 2e-5, 8e-10), (2, 10**6, 1e-6, 1e-9),
    (64, 12_345, 1e-5, 1e-9), (8, 0, 1e-5, 1e-9)])
def test_the_referees_number_of_segments_is_the_best_of_all(p, n, alpha, beta):
    top = int(4 * math.sqrt(p * n * beta / alpha)) + 10
    least = min(segments.chain_s(p, n, alpha, beta, k) for k in range(1, top))
    assert segments.best_s(p, n, alpha, beta)[1] == pytest.approx(
        least, rel=segments.TOLERANCE / 100)


# ---- parameter servers --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_nobody_is_too_early_only_if_all_have_begun(workers):
    """Where nobody moves, nobody is ahead."""
    case = Case("", [()] * 3, facts={"paces": [[1.0], [1.0]], "staleness": 1})
    spans = [Span(worker + 1, "compute", 0.0, 1.0, "0") for worker in range(workers)]
    verdict = bounding.begins(late=False)(case, Outcome(trace=Trace(3, spans=spans)))
    assert verdict.passed == (workers == 2)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, math.inf])
def test_the_referees_times_are_those_of_our_own_parameter_server(staleness):
    """Two independent ways to SSP: the formula of the check, and `ps` in the simulator."""
    speeds = np.random.default_rng(5).uniform(0.05, 1.0, (4, 8)).tolist()
    rule = SSP(staleness) if staleness else BSP()
    _, workers = diaries(rule, speeds)
    for (pulled, _), wanted in zip(workers, bounding.begins_s(speeds, staleness), strict=True):
        assert pulled == pytest.approx(wanted, abs=1e-3)


def test_the_server_of_the_ssp_check_runs_in_the_simulator_by_itself():
    paces = [[], [0.1, 0.1], [0.3, 0.1]]
    result = simulate(lambda comm: bounding.cluster(counts_who_is_behind, comm,
                                                    paces[comm.rank], 1),
                      network=uniform(3, 1e-7, math.inf))
    assert result.values == [bounding.YES] * 3


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_plain_sgd_is_far_from_the_loss_that_is_asked_for(seed):
    """Else the check of the loss would prove nothing."""
    def plain(request, worker, w, g, backups, lr, lam):
        if request == "push":
            w -= lr * g
        return w

    def does_not_learn(request, worker, w, g, backups, lr, lam):
        return w

    loss = {answer: compensating.loss_of(compensating.train(answer, seed), seed)
            for answer in (compensating.right, plain, does_not_learn)}
    assert loss[compensating.right] < loss[does_not_learn]
    assert loss[plain] > 2 * loss[compensating.right]


# ---- the chain ----------------------------------------------------------------------------------

node = solution("chain-replication")


def test_a_crash_changes_nothing_before_it():
    """So the moments of a calm run are the moments at which a node could have died."""
    calm = chain_run.ChainRun(node, 3, 5).run()
    for crash in calm.points(1):
        run = chain_run.ChainRun(node, 3, 5, [crash]).run()
        assert run.handled[1] == calm.handled[1][: crash.event + 1]


def test_every_moment_of_every_node_is_tried():
    counts = [len(list(chain.run_all(node, 3, [7], [(victim,)]))) for victim in range(3)]
    calm = chain_run.ChainRun(node, 3, 7).run()
    assert counts == [sum(max(sent, 1) for sent in calm.handled[victim]) for victim in range(3)]
    assert min(counts) > chain_run.ADDS


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


# ---- chapter 15 ---------------------------------------------------------------------------------

IN_MEMORY = """
KEPT = {}
def checkpoints(disk):
    def save(state):
        KEPT["state"] = {"step": state["step"], "weights": state["weights"].clone()}
        yield
    return save, lambda: KEPT.get("state")
"""


def test_a_checkpoint_in_memory_does_not_outlive_its_process():
    assert judged("surviving-checkpoint", function_in(IN_MEMORY, "checkpoints")).points == 0


def test_a_step_takes_no_more_indices_than_there_are_samples():
    x, many = torch.zeros(14, 6), torch.zeros(4, 1000, dtype=torch.int64)
    with pytest.raises(ConfigError, match="4000 samples, and there are 14"):
        restart_bits._step(x, x, many, x, 0.1, [x] * 4, [x] * 4)


@pytest.mark.parametrize(("unsynced", "found"),
                         [("whole", b"newer"), ("torn", b"ne"), ("lost", b"")])
def test_what_is_not_synced_may_be_torn_or_lost_in_a_power_cut(unsynced, found):
    disk = surviving_checkpoint.Disk({"old": b"older"})
    disk.write("new", b"newer")
    disk.rename("new", "old")
    assert disk.files_after_crash(unsynced)["old"] == found
    disk.sync("old")
    assert disk.files_after_crash(unsynced)["old"] == b"newer"


def test_a_process_that_dies_leaves_what_was_on_the_disk_at_its_last_operation():
    plan = surviving_checkpoint.KillPlan([(2, "lost")])
    process = surviving_checkpoint.Process(plan, (), rank=0)
    sent = []
    comm = SimpleNamespace(send=lambda x, dst: sent.append((x, dst)))
    assert process.go_on(comm, [], None)[0] == 1
    log = [("write", "a", b"1"), ("sync", "a"), ("write", "b", b"2")]
    assert process.go_on(comm, log) is None
    ((files, done, begun), dst), = sent
    assert (sorted(files), done, begun, dst) == (["a"], 0, 1, 1)
