"""Right and wrong answers to the exercises of chapter 02."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtlab.grading.exercises import finish_times as finishing
from dtlab.grading.exercises import place_job as placing
from tests.exercises.answers import first_hint, judged, lost

FINISH = {"alone", "equal flows", "one ends", "held back elsewhere", "unseen clusters", "edges"}
PLACE = {"a placement", "time, empty racks", "time, busy racks", "bytes over the spine",
         "small jobs"}


# ---- finish-times ------------------------------------------------------------------------------


def fair(routes, capacity):
    """Rates by filling up; `routes` by flow."""
    rates, free = {}, dict(capacity)
    while len(rates) < len(routes):
        waiting = {flow for flow in routes if flow not in rates}
        share, link = min(
            (free[link] / count, link) for link in free
            if (count := sum(link in routes[flow] for flow in waiting)))
        for flow in waiting:
            if link in routes[flow]:
                rates[flow] = share
                for crossed in routes[flow]:
                    free[crossed] -= share
    return rates


def by_events(sizes, routes, capacity, rule=fair, durations=False):
    left = {flow: size for flow, size in enumerate(sizes) if size}
    ends, now = [0.0] * len(sizes), 0.0
    while left:
        rates = rule({flow: routes[flow] for flow in left}, capacity)
        first = min(left, key=lambda flow: left[flow] / rates[flow])
        step = left[first] / rates[first]
        now += step
        left = {flow: size - step * rates[flow] for flow, size in left.items()}
        for flow in [flow for flow, size in left.items() if size < 1e-6 or flow == first]:
            ends[flow] = step if durations else now
            del left[flow]
    return ends


def small_steps(sizes, routes, capacity):  # right as well: all rates grow together, in NumPy
    links = sorted(capacity)
    uses = np.array([[link in route for link in links] for route in routes], float)
    room = np.array([capacity[link] for link in links])
    left, ends, now = np.array(sizes, float), np.zeros(len(sizes)), 0.0
    while (left > 1e-6).any():
        rates, growing = np.zeros(len(sizes)), left > 1e-6
        while growing.any():
            crowd = growing @ uses
            with np.errstate(divide="ignore", invalid="ignore"):
                more = np.where(crowd > 0, (room - rates @ uses) / crowd, np.inf)
            rates[growing] += more.min()
            growing &= ~(uses @ (more <= more.min() * (1 + 1e-9)) > 0)
        step = (left[rates > 0] / rates[rates > 0]).min()
        now += step
        ends[left > 1e-6] = now
        left = left - step * rates
    return ends


def alone(sizes, routes, capacity):
    return [n / min(capacity[link] for link in route)
            for n, route in zip(sizes, routes, strict=True)]


def link_after_link(sizes, routes, capacity):
    return [sum(n / capacity[link] for link in route)
            for n, route in zip(sizes, routes, strict=True)]


def never_again(sizes, routes, capacity):
    rates = fair(dict(enumerate(routes)), capacity)
    return [n / rates[flow] for flow, n in enumerate(sizes)]


def equal_parts(sizes, routes, capacity):
    def rule(moving, capacity):
        def crowd(link):
            return sum(link in route for route in moving.values())
        return {flow: min(capacity[link] / crowd(link) for link in route)
                for flow, route in moving.items()}

    return by_events(sizes, routes, capacity, rule)


def link_by_link_in_any_order(sizes, routes, capacity):
    """Each link hands its capacity out, and forgets what was used up elsewhere."""
    def rule(moving, capacity):
        rates = {}
        for link in capacity:
            crowd = [flow for flow, route in moving.items() if link in route]
            for flow in crowd:
                rates.setdefault(flow, capacity[link] / len(crowd))
        return rates

    return by_events(sizes, routes, capacity, rule)


def durations(sizes, routes, capacity):
    return by_events(sizes, routes, capacity, durations=True)


def first_links_only(sizes, routes, capacity):
    return by_events(sizes, [route[:1] for route in routes], capacity)


def eight_times(sizes, routes, capacity):
    return [8 * end for end in by_events(sizes, routes, capacity)]


def milliseconds(sizes, routes, capacity):
    return [1e3 * end for end in by_events(sizes, routes, capacity)]


def needs_bytes(sizes, routes, capacity):
    ends = by_events(sizes, routes, capacity)
    return [end if n else math.nan for end, n in zip(ends, sizes, strict=True)]


def in_order_of_the_ends(sizes, routes, capacity):
    return sorted(by_events(sizes, routes, capacity))


def the_last(sizes, routes, capacity):
    return max(by_events(sizes, routes, capacity), default=0.0)


def beyond_floats(sizes, routes, capacity):
    return [10**400 for _ in sizes]


def nobody_ever(sizes, routes, capacity):
    return [math.inf for _ in sizes]


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (beyond_floats, FINISH, "a list of numbers"),
    (nobody_ever, FINISH, "infinite or not a number"),
    (alone, FINISH - {"alone", "edges"}, "as if it were alone"),
    (link_after_link, FINISH, "don't add up"),
    (never_again, {"one ends", "held back elsewhere", "unseen clusters", "edges"}, "Too slow"),
    (equal_parts, {"held back elsewhere", "unseen clusters"}, "held back elsewhere leaves"),
    (link_by_link_in_any_order, {"held back elsewhere", "unseen clusters"}, "Fill up"),
    (durations, FINISH - {"equal flows", "edges"}, "lengths of the last stretches"),
    (first_links_only, FINISH - {"edges"}, "not on the narrowest"),
    (eight_times, FINISH, "no factor of 8"),
    (milliseconds, FINISH, "milliseconds"),
    (needs_bytes, {"edges"}, "0 bytes ends at 0 s"),
    (in_order_of_the_ends, {"unseen clusters"}, ""),
    (the_last, FINISH, "a list of numbers"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_finish_times(answer, rows, hint):
    report = judged("finish-times", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


@pytest.mark.parametrize("seed", range(6))
def test_the_times_asked_for_are_those_of_a_filling_by_hand(seed):
    for check in finishing.EXERCISE.build(seed):
        for case in check.cases:
            wanted = finishing._truth(case)
            assert by_events(*case.args[0]) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_unseen_clusters_need_all_of_the_rule(seed):
    """No simpler rule passes by luck, whatever is drawn."""
    (unseen,) = [c for c in finishing.EXERCISE.build(seed) if c.name == "unseen clusters"]
    for simpler in (alone, never_again, equal_parts):
        wrong = [not finishing._near(simpler(*case.args[0]), finishing._truth(case))
                 for case in unseen.cases]
        assert sum(wrong) >= 2


# ---- place-job ---------------------------------------------------------------------------------


def by_rack(rack_of, free):
    room = {}
    for host in free:
        room.setdefault(rack_of[host], []).append(host)
    return list(room.values())


def fullest_first(rack_of, free, ranks):
    racks = sorted(by_rack(rack_of, free), key=len, reverse=True)
    return [host for rack in racks for host in rack][:ranks]


def sorted_by_key(rack_of, free, ranks):  # right as well
    room = {rack: sum(rack_of[host] == rack for host in free) for rack in set(rack_of)}
    return sorted(free, key=lambda host: (-room[rack_of[host]], rack_of[host]))[:ranks]


def as_offered(rack_of, free, ranks):
    return free[:ranks]


def by_number(rack_of, free, ranks):
    return sorted(free)[:ranks]


def rack_after_rack(rack_of, free, ranks):
    return sorted(free, key=lambda host: rack_of[host])[:ranks]


def least_room_first(rack_of, free, ranks):
    racks = sorted(by_rack(rack_of, free), key=len)
    return [host for rack in racks for host in rack][:ranks]


def right_hosts_wrong_order(rack_of, free, ranks):
    chosen = set(fullest_first(rack_of, free, ranks))
    return [host for host in free if host in chosen]


def also_taken_hosts(rack_of, free, ranks):
    return sorted(range(len(rack_of)), key=lambda host: rack_of[host])[:ranks]


def all_that_is_free(rack_of, free, ranks):
    return fullest_first(rack_of, free, len(free))


def the_racks(rack_of, free, ranks):
    return [rack_of[host] for host in fullest_first(rack_of, free, ranks)]


@pytest.mark.parametrize(("answer", "rows", "hint"), [
    (as_offered, PLACE - {"a placement"}, "next to each other"),
    (by_number, PLACE - {"a placement"}, "next to each other"),
    (rack_after_rack, {"bytes over the spine", "small jobs"}, "most free hosts"),
    (least_room_first, {"bytes over the spine", "small jobs"}, "most free hosts"),
    (right_hosts_wrong_order, PLACE - {"a placement", "small jobs"}, "next to each other"),
    (also_taken_hosts, PLACE, "Only hosts that are in `free`"),
    (all_that_is_free, PLACE, "p hosts"),
    (the_racks, PLACE, ""),
], ids=lambda v: getattr(v, "__name__", ""))
def test_place_job(answer, rows, hint):
    report = judged("place-job", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report)


def test_a_job_that_fits_into_one_rack_is_told_that_no_hop_need_cross_the_spine():
    def by_number_if_small(rack_of, free, ranks):
        choose = fullest_first if ranks > 6 else by_number
        return choose(rack_of, free, ranks)

    report = judged("place-job", by_number_if_small)
    assert lost(report) == {"small jobs"}
    assert "of the ring's 6 hops cross the spine, where 0 would do" in first_hint(report)


@pytest.mark.parametrize("seed", range(12))
def test_half_the_time_is_within_reach_with_room_to_spare(seed):
    for check in placing.EXERCISE.build(seed):
        if check.name.startswith("time"):
            for case in check.cases:
                where, ranks = case.facts["hall"], case.facts["ranks"]
                offered = placing.cost_of(where, where.free[:ranks])
                best = placing.cost_of(where, placing.compact(where, ranks))
                assert best.elapsed_s < 0.8 * offered.elapsed_s / 2


@pytest.mark.parametrize("seed", range(4))
def test_no_placement_drawn_at_random_puts_fewer_bytes_on_the_spine(seed):
    random = np.random.default_rng(seed)
    where = placing.hall(3, 4, (2, 1, 0), seed)
    for ranks in (3, 5, 7):
        least = placing.cost_of(where, placing.compact(where, ranks)).spine_bytes
        for _ in range(20):
            drawn = tuple(random.permutation(where.free)[:ranks].tolist())
            assert placing.cost_of(where, drawn).spine_bytes >= 0.99 * least


def test_small_jobs_do_without_the_spine():
    report = judged("place-job", fullest_first)
    assert {row.name: row.nbytes for row in report.rows}["small jobs"] == "0 / 0"


@pytest.mark.parametrize(("exercise", "answer", "points"), [
    ("finish-times", by_events, 8), ("finish-times", small_steps, 8),
    ("place-job", fullest_first, 8), ("place-job", sorted_by_key, 8),
], ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("seed", [1, 2])
def test_different_right_answers_get_all_points(exercise, answer, points, seed):
    report = judged(exercise, answer, seed)
    assert report.points == report.max_points == points, str(report)
    assert first_hint(report) == ""
