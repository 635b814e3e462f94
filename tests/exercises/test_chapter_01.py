"""Chapter 01: what the graders say of right answers, and of likely mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtlab.collectives import all_gather, all_reduce
from tests.exercises.answers import first_hint, judged, lost

ALL_1 = {"equal shards", "unequal shards", "empty shards", "unchanged", "bytes", "real"}
UNEQUAL = {"unequal shards", "empty shards", "bytes", "real"}
ALL_2 = {"speedup", "efficiency", "serial share", "edges", "least squares"}


def weighted(comm, gradient, samples, by=None):
    total = torch.cat([samples * gradient, gradient.new_tensor([samples])])
    all_reduce(comm, total)
    return total[:-1] / (by(comm, samples) if by else total[-1])


def average_of_averages(comm, gradient, samples):
    return all_reduce(comm, gradient.clone(), "avg")


def sums(comm, gradient, samples):
    return all_reduce(comm, gradient.clone())


def its_own(comm, gradient, samples):
    return gradient.clone()


def divides_by_ranks(*args):
    return weighted(*args, by=lambda comm, samples: comm.size)


def divides_by_its_own(*args):
    return weighted(*args, by=lambda comm, samples: max(samples, 1))


def divides_by_its_own_times_the_ranks(*args):
    return weighted(*args, by=lambda comm, samples: torch.tensor(samples) * comm.size)


def in_place(comm, gradient, samples):
    count = all_reduce(comm, torch.tensor(samples, dtype=torch.float64))
    gradient *= samples
    return all_reduce(comm, gradient) / count


def leaves_if_empty(comm, gradient, samples):
    return weighted(comm, gradient, samples) if samples else gradient


def gathers_all(comm, gradient, samples):
    own = torch.cat([samples * gradient, gradient.new_tensor([samples])])
    total = all_gather(comm, own).sum(0)
    return total[:-1] / total[-1]


def returns_nothing(comm, gradient, samples):
    gradient *= samples


WRONG_1 = [
    (average_of_averages, UNEQUAL, "An average of averages"),
    (sums, ALL_1, "not averaged"),
    (its_own, ALL_1 - set(), "the others' never came"),
    (divides_by_ranks, ALL_1, "divided by the number of ranks"),
    (divides_by_its_own, ALL_1, "not averaged"),
    (divides_by_its_own_times_the_ranks, UNEQUAL, "Divide by the samples of all ranks"),
    (returns_nothing, ALL_1, "Return the tensor"),
    (in_place, {"unchanged"}, "works in place"),
    (leaves_if_empty, {"empty shards"}, "it must take part"),
    (gathers_all, {"bytes"}, "don't gather all gradients"),
]


def scaled(times, speedup=lambda t, n: t[1] / t[n], efficiency=lambda t, n: t[1] / t[n] / n,
           serial=None):
    line = [(1 - 1 / n, t / times[1] - 1 / n) for n, t in times.items()]
    fitted = sum(a * y for a, y in line) / sum(a * a for a, _ in line)
    return ({n: speedup(times, n) for n in times}, {n: efficiency(times, n) for n in times},
            serial(times) if serial else fitted)


def exchanges_both(times):
    speedup, efficiency, serial = scaled(times)
    return efficiency, speedup, serial


def upside_down(times):
    return scaled(times, speedup=lambda t, n: t[n] / t[1])


def takes_throughput(times):
    return scaled(times, efficiency=lambda t, n: t[n] / (n * t[1]))


def percent(times):
    return scaled(times, efficiency=lambda t, n: 100 * t[1] / t[n] / n)


def cut_off_at_one(times):
    return scaled(times, efficiency=lambda t, n: min(1.0, t[1] / t[n] / n))


def first_in_the_dictionary(times):
    first = next(iter(times.values()))
    return scaled(times, lambda t, n: first / t[n], lambda t, n: first / t[n] / n)


def mean_of_the_shares(times):
    return scaled(times, serial=lambda t: sum(
        (s / t[1] - 1 / n) / (1 - 1 / n) for n, s in t.items() if n > 1) / (len(t) - 1))


def the_other_share(times):
    return scaled(times, serial=lambda t: 1 - scaled(t)[2])


def forgets_one_over_n(times):
    return scaled(times, serial=lambda t: t[max(t)] / t[1])


def the_last_run_only(times):
    return scaled(times, serial=lambda t: (t[max(t)] / t[1] - 1 / max(t)) / (1 - 1 / max(t)))


def line_with_an_intercept(times):
    def slope(t):
        parts = [(1 - 1 / n, s / t[1] - 1 / n) for n, s in t.items()]
        return float(np.polyfit(*zip(*parts, strict=True), 1)[0])

    return scaled(times, serial=slope)


def two_things(times):
    return scaled(times)[:2]


WRONG_2 = [
    (exchanges_both, {"speedup", "efficiency", "edges"}, "This is the efficiency"),
    (upside_down, {"speedup"}, "upside down"),
    (takes_throughput, {"efficiency", "edges"}, "throughputs"),
    (percent, {"efficiency", "edges"}, "This is in percent"),
    (cut_off_at_one, {"edges"}, "It is cut off at 1"),
    (first_in_the_dictionary, {"edges"}, "T_1 is times[1], wherever it stands"),
    (mean_of_the_shares, {"least squares"}, "more devices weigh more"),
    (the_other_share, {"serial share", "least squares"}, "the share that can be divided"),
    (forgets_one_over_n, {"serial share", "least squares"}, "1/n of the work is still there"),
    (the_last_run_only, {"least squares"}, "from the largest run alone"),
    (line_with_an_intercept, {"least squares"}, "a line through 0"),
    (two_things, ALL_2, "Return speedups, efficiencies and the serial share"),
]


@pytest.mark.parametrize(("exercise", "answer", "rows", "hint"), [
    *(("unequal-shards", *wrong) for wrong in WRONG_1),
    *(("efficiency", *wrong) for wrong in WRONG_2),
], ids=[wrong[0].__name__ for wrong in (*WRONG_1, *WRONG_2)])
def test_a_wrong_answer_loses_points_and_is_told_why(exercise, answer, rows, hint):
    report = judged(exercise, answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)
