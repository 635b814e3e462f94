"""Chapter 14: what the graders say of right answers, and of likely mistakes."""

from __future__ import annotations

import pytest

from tests.exercises.answers import first_hint, judged, lost

ALL_2 = {"fits", "good", "best", "few predictions"}


# ---- orders --------------------------------------------------------------------------------------


def most_last(sizes, sent, gpus, inside_Bps, card_Bps):
    return sorted(sizes, key=lambda name: sent[name])


def most_first(sizes, sent, gpus, inside_Bps, card_Bps):
    return sorted(sizes, key=lambda name: -sent[name])


def tp_last(sizes, sent, gpus, inside_Bps, card_Bps):
    return sorted(sizes)


def largest_last(sizes, sent, gpus, inside_Bps, card_Bps):
    return sorted(sizes, key=lambda name: sizes[name])


def a_dictionary(sizes, sent, gpus, inside_Bps, card_Bps):
    return sizes


WRONG_1 = [
    (most_last, {"groups too large"}, "fit into a server"),
    (most_first, {"time", "other loads", "groups too large"}, "the other way round"),
    (tp_last, {"time", "other loads", "groups too large"}, "other way round"),
    (largest_last, {"time", "groups too large"}, ""),
    (a_dictionary, {"an order", "time", "other loads", "groups too large"}, "Return a list"),
]


# ---- layouts -------------------------------------------------------------------------------------


def search(predict, layers, heads, devices, batch, memory_bytes, *, fits=True, stages=(0, 1, 2, 3),
           recomputes=("none", "selective", "full"), largest=1000, most_tp=1000):
    found = {}
    for pp in range(1, devices + 1):
        for tp in range(1, min(devices, most_tp) + 1):
            dp = max(1, devices // (pp * tp))
            for micro_batch in range(1, min(batch, largest) + 1):
                for stage in stages:
                    for recompute in recomputes:
                        of = pp, dp, tp, micro_batch, stage, recompute
                        took = predict(*of)
                        if took and (took[1] <= memory_bytes or not fits):
                            found[of] = took[0]
    best = min(found, key=found.get)
    return dict(zip(("pp", "dp", "tp", "micro_batch", "stage", "recompute"), best, strict=True))


def forgets_the_memory(*args):
    return search(*args, fits=False)


def never_recomputes_a_part(*args):
    return search(*args, recomputes=("none", "full"))


def asks_for_all(*args):
    return search(*args)


def a_tuple(*args):
    return 1, 2, 3


def a_wrong_product(predict, layers, heads, devices, batch, memory_bytes):
    return {"pp": 1, "dp": devices, "tp": 2, "micro_batch": 1, "stage": 0, "recompute": "none"}


def saves_too_much(predict, layers, heads, devices, batch, memory_bytes):
    return {"pp": 1, "dp": devices // 8, "tp": 8, "micro_batch": 1, "stage": 3, "recompute": "full"}


WRONG_2 = [
    (forgets_the_memory, ALL_2, "leave out what doesn't fit"),
    (never_recomputes_a_part, {"best", "few predictions"}, "differs in"),
    (asks_for_all, {"few predictions"}, "Ask only"),
    (a_tuple, ALL_2, "Return a dictionary"),
    (a_wrong_product, ALL_2, "must be the number of devices"),
    (saves_too_much, ALL_2, "must be the number of devices"),
]


@pytest.mark.parametrize(("exercise", "answer", "rows", "hint"), [
    *(("order-axes", *wrong) for wrong in WRONG_1),
    *(("choose-layout", *wrong) for wrong in WRONG_2),
], ids=[wrong[0].__name__ for wrong in (*WRONG_1, *WRONG_2)])
def test_a_wrong_answer_loses_points_and_is_told_why(exercise, answer, rows, hint):
    report = judged(exercise, answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)
