"""Right and wrong answers to the exercises of chapter 08."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dtlab import simulate
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercises import dc_asgd as compensating
from dtlab.grading.exercises import ssp_rule as bounding
from dtlab.ps import BSP, DCASGD, SSP
from dtlab.trace import Span, Trace
from tests.exercises.answers import first_hint, judged, lost
from tests.ps.test_consistency import diaries

RULE, PUSHES, EARLY = "the rule", "pushes", "never more than s ahead"
LATE, ENDS = "s ahead is allowed", "both ends"
EQUATION, OWN, ANEW, LOSS = ("equation", "own backup", "a pull makes it anew",
                             "loss under delay")


# ---- ssp-rule ----------------------------------------------------------------------------------


def counts_who_is_behind(request, clock, clocks, staleness):  # right as well
    if request == "push":
        return True
    return not [other for other in clocks if other < clock - staleness]


def in_numpy(request, clock, clocks, staleness):  # right as well
    return int(request != "pull" or np.min(clocks) + staleness >= clock)


def too_strict(request, clock, clocks, staleness):
    return request == "push" or clock - min(clocks) < staleness


def too_lax(request, clock, clocks, staleness):
    return request == "push" or clock - min(clocks) <= staleness + 1


def fastest(request, clock, clocks, staleness):
    return request == "push" or clock - max(clocks) <= staleness


def behind_the_fastest(request, clock, clocks, staleness):
    return request == "push" or max(clocks) - clock <= staleness


def spread(request, clock, clocks, staleness):
    return request == "push" or max(clocks) - min(clocks) <= staleness


def pushes_not_pulls(request, clock, clocks, staleness):
    return request == "pull" or clock - min(clocks) <= staleness


def pushes_too(request, clock, clocks, staleness):
    return clock - min(clocks) <= staleness


def average(request, clock, clocks, staleness):
    return request == "push" or clock - sum(clocks) / len(clocks) <= staleness


def nothing_is_allowed(request, clock, clocks, staleness):
    return False


def returns_nothing(request, clock, clocks, staleness):
    print(request == "push" or clock - min(clocks) <= staleness)


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (too_strict, {RULE, LATE, ENDS}, "too strict"),
    (too_lax, {RULE, EARLY, ENDS}, "too lax"),
    (fastest, {RULE, EARLY, ENDS}, "with the fastest"),
    (behind_the_fastest, {RULE, EARLY, LATE, ENDS}, "behind the fastest"),
    (spread, {RULE, LATE}, "the one who asks"),
    (pushes_not_pulls, {RULE, PUSHES, EARLY, ENDS}, "let pulls through"),
    (pushes_too, {PUSHES}, "always accepted"),
    (average, {RULE, EARLY}, "average"),
    (nothing_is_allowed, {RULE, PUSHES, EARLY, LATE, ENDS}, "Nothing is ever allowed"),
    (returns_nothing, {RULE, PUSHES, EARLY, LATE, ENDS}, "True or False"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_ssp_rule(answer, rows, hint):
    report = judged("ssp-rule", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("answer", [counts_who_is_behind, in_numpy], ids=lambda f: f.__name__)
def test_the_rule_may_be_written_in_other_ways(answer):
    assert judged("ssp-rule", answer).points == 8


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_nobody_is_too_early_only_if_all_have_begun(workers):
    """Where nobody moves, nobody is ahead."""
    case = Case("", [()] * 3, facts={"paces": [[1.0], [1.0]], "staleness": 1})
    spans = [Span(worker + 1, "compute", 0.0, 1.0, "0") for worker in range(workers)]
    verdict = bounding._not_too_early(case, Outcome(trace=Trace(3, spans=spans)))
    assert verdict.passed == (workers == 2)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, math.inf])
def test_the_referees_times_are_those_of_our_own_parameter_server(staleness):
    """Two independent ways to SSP: the formula of the check, and `ps` in the simulator."""
    speeds = np.random.default_rng(5).uniform(0.05, 1.0, (4, 8)).tolist()
    rule = SSP(staleness) if staleness else BSP()
    _, workers = diaries(rule, speeds)
    for (pulled, _), wanted in zip(workers, bounding.begins_s(speeds, staleness), strict=True):
        assert pulled == pytest.approx(wanted, abs=1e-3)


# ---- dc-asgd -----------------------------------------------------------------------------------


def with_other_words(request, worker, w, g, backups, lr, lam):  # right as well
    if request == "pull":
        backups[worker] = w.detach().clone()
        return w.clone()
    correction = g.pow(2).mul(w - backups[worker])
    w.sub_(g.mul(lr)).sub_(correction, alpha=lr * lam)
    return None


def through_the_library(request, worker, w, g, backups, lr, lam):
    rule = DCASGD(lr, lam)
    if request == "pull":
        rule.pulled(w, backups, worker)
    else:
        rule.step_(w, rule.prepare(g, w, backups, worker, 0), backups, 1)
    return w


def wrong(correction, key=lambda worker: worker, copies=True, always=True, at_push=False):
    def dc_asgd(request, worker, w, g, backups, lr, lam):
        if request == "pull":
            if always or key(worker) not in backups:
                backups[key(worker)] = w.clone() if copies else w
        else:
            w -= lr * (g + lam * correction(g, w - backups[key(worker)]))
            if at_push:
                backups[key(worker)] = w.clone()
        return w
    return dc_asgd


def right_term(g, d):
    return g * g * d


def not_in_place(request, worker, w, g, backups, lr, lam):
    if request == "pull":
        backups[worker] = w.clone()
        return w
    return w - lr * (g + lam * g * g * (w - backups[worker]))


def spoils_the_gradient(request, worker, w, g, backups, lr, lam):
    if request == "pull":
        backups[worker] = w.clone()
        return w
    g += lam * g * g * (w - backups[worker])
    w -= lr * g
    return w


def pulls_give_nothing(request, worker, w, g, backups, lr, lam):
    if request == "pull":
        backups[worker] = w.clone()
    else:
        w -= lr * (g + lam * g * g * (w - backups[worker]))


ALL = {EQUATION, OWN, ANEW, LOSS}


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (wrong(lambda g, d: -g * g * d), ALL, "sign"),
    (wrong(lambda g, d: torch.outer(g.flatten(), g.flatten()).mv(d.flatten()).view_as(d)), ALL,
     "outer product"),
    (wrong(lambda g, d: (g * g).sum() * d), ALL, "as a whole"),
    (wrong(lambda g, d: g * d), ALL, "only once"),
    (wrong(lambda g, d: 0 * d), ALL, "plain SGD"),
    (wrong(right_term, copies=False), ALL, "w.clone()"),
    (wrong(lambda g, d: g * g * d / (0.05 * g * g + 1e-7).sqrt()), ALL, "adaptive"),
    (wrong(right_term, key=lambda worker: 0), {OWN, ANEW, LOSS}, "One backup for all"),
    (wrong(right_term, at_push=True), {EQUATION, OWN, ANEW}, "not at a push"),
    (wrong(right_term, always=False), {ANEW, LOSS}, "once and never again"),
    (not_in_place, ALL, "in place"),
    (spoils_the_gradient, {EQUATION, OWN, ANEW}, "g was changed"),
    (pulls_give_nothing, ALL, "must return the weights"),
    (through_the_library, ALL, "the library's own"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_dc_asgd(answer, rows, hint):
    report = judged("dc-asgd", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("seed", [0, 2])
def test_the_update_may_be_written_in_other_ways(seed):
    assert judged("dc-asgd", with_other_words, seed).points == 8


def does_not_learn(request, worker, w, g, backups, lr, lam):
    return w


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_plain_sgd_is_far_from_the_loss_that_is_asked_for(seed):
    """Else the check of the loss would prove nothing."""
    plain = wrong(lambda g, d: 0 * d)
    compensated = compensating.loss_of(compensating.train(compensating.right, seed), seed)
    uncompensated = compensating.loss_of(compensating.train(plain, seed), seed)
    assert compensated < compensating.loss_of(compensating.train(does_not_learn, seed), seed)
    assert uncompensated > 2 * compensated


def test_a_harness_runs_on_every_rank_and_in_the_simulator():
    """The server of the SSP check, driven by hand: all go on, and each rank says so."""
    from dtlab.topology import uniform

    paces = [[], [0.1, 0.1], [0.3, 0.1]]
    result = simulate(lambda comm: bounding.cluster(counts_who_is_behind, comm,
                                                    paces[comm.rank], 1),
                      network=uniform(3, 1e-7, math.inf))
    assert result.values == [bounding.YES] * 3
