"""Chapter 12: what the graders say of right answers, and of likely mistakes."""

from __future__ import annotations

import pytest

from tests.exercises.answers import first_hint, judged, lost

ALL_1 = {"runs", "any p, any m", "memory", "bubble", "gradients"}
ALL_2 = {"runs", "faster", "uneven times", "as the best", "more room"}


def alternating(p, m, begin=lambda p, r, m: min(m, p - r), flush=True):
    rows = []
    for r in range(p):
        first = min(m, begin(p, r, m))
        row = [f"{r}F{i}" for i in range(first)]
        for i in range(m):
            if flush or first + i < m:
                row.append(f"{r}B{i}")
            if first + i < m:
                row.append(f"{r}F{first + i}")
        rows.append(row)
    return rows


def one_too_many(p, m):
    return alternating(p, m, lambda p, r, m: p - r + 1)


def one_too_few(p, m):
    return alternating(p, m, lambda p, r, m: max(p - r - 1, 1))


def gpipe_instead(p, m):
    return alternating(p, m, lambda p, r, m: m)


def the_wrong_way_round(p, m):
    return alternating(p, m, lambda p, r, m: r + 1)


def forgets_the_flush(p, m):
    return alternating(p, m, flush=False)


def a_micro_batch_twice(p, m):
    return [[*row, f"{r}B{m - 1}"] for r, row in enumerate(alternating(p, m))]


def deadlocks(p, m):
    rows = alternating(p, m)
    if p > 1 and m > 1:
        rows[-1] = [f"{p - 1}{kind}{i}" for i in reversed(range(m)) for kind in "FB"]
    return rows


def too_few_micro_batches(p, m):
    return [[f"{r}F{i}" for i in range(p - r)] + [w for i in range(m) for w in (
        [f"{r}B{i}"] + [f"{r}F{p - r + i}"] * (p - r + i < m))] for r in range(p)]


def one_after_the_other(p, m):
    return [[f"{r}{kind}{i}" for i in range(m) for kind in "FB"] for r in range(p)]


def a_grid_as_text(p, m):
    return "\n".join(" ".join(row) for row in alternating(p, m))


WRONG_1 = [
    (one_too_many, {"memory"}, "One forward too many"),
    (one_too_few, {"bubble"}, "with fewer it waits"),
    (gpipe_instead, {"memory"}, "that is GPipe"),
    (the_wrong_way_round, {"runs", *ALL_1}, "The ranks wait for each other"),
    (forgets_the_flush, ALL_1, "backwards that are left"),
    (a_micro_batch_twice, ALL_1, "forward once"),
    (deadlocks, {"runs", "any p, any m", "memory", "bubble", "gradients"}, "wait for each other"),
    (too_few_micro_batches, {"any p, any m"}, "min(m, p − i)"),
    (one_after_the_other, {"bubble"}, "waits again and again"),
    (a_grid_as_text, ALL_1, "for each rank, a list of texts"),
]


def plain(p, m, *_):
    return alternating(p, m)


def split(p, m, *_, waiting=lambda r: r, ahead=lambda p, r: p - r, swap=False):
    rows = []
    for r in range(p):
        first = min(m, ahead(p, r))
        row, done = [f"{r}F{i}" for i in range(first)], 0
        for i in range(m):
            row.append(f"{r}I{i}")
            if i + 1 - done > waiting(r):
                row.append(f"{r}W{done}")
                done += 1
            if first + i < m:
                row.append(f"{r}F{first + i}")
        row += [f"{r}W{i}" for i in range(done, m)]
        if swap:
            i, w = row.index(f"{r}I0"), row.index(f"{r}W0")
            row[i], row[w] = row[w], row[i]
        rows.append(row)
    return rows


def ignores_the_limit(*args):
    return split(*args, waiting=lambda r: 2 * r, ahead=lambda p, r: 2 * (p - r) - 1)


def ignores_the_room(*args):
    return split(*args)


def weights_before_inputs(*args):
    return split(*args, swap=True)


def weights_at_once(*args):
    return split(*args, waiting=lambda r: 0)


def weights_at_the_end(*args):
    return split(*args, waiting=lambda r: 10**6)


def both_kinds(p, m, *rest):
    return [[*row, f"{r}B0"] for r, row in enumerate(split(p, m, *rest))]


WRONG_2 = [
    (plain, {"faster", "uneven times", "as the best", "more room"}, "cut B into I and W"),
    (ignores_the_limit, ALL_2, "do a W before"),
    (ignores_the_room, {"more room"}, "as many as the limit allows"),
    (weights_before_inputs, ALL_2, "W needs its I"),
    (weights_at_once, None, ""),
    (weights_at_the_end, ALL_2, "do a W before"),
    (both_kinds, ALL_2, "Either B"),
    (lambda *args: [["hello"]], ALL_2, "Write each action as"),
    (lambda *args: 7, ALL_2, "Return a list"),
    (lambda *args: [["0F0"] * 30_000], ALL_2, ""),
]


@pytest.mark.parametrize(("exercise", "answer", "rows", "hint"), [
    *(("one-f-one-b", *wrong) for wrong in WRONG_1),
    *(("beat-one-f-one-b", *wrong) for wrong in WRONG_2)])
def test_a_wrong_answer_loses_points_and_is_told_why(exercise, answer, rows, hint):
    report = judged(exercise, answer)
    assert lost(report) == rows if rows else lost(report), str(report)
    assert hint in first_hint(report), first_hint(report)


def test_the_package_s_own_schedule_earns_nothing():
    from dtlab.parallel import pipeline

    def borrowed(p, m):
        return [[str(action) for action in row] for row in pipeline.one_f_one_b(p, m).rows]

    report = judged("one-f-one-b", borrowed)
    assert lost(report) == ALL_1
    assert "only what you write yourself" in first_hint(report)
