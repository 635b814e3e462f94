"""Hidden inputs: drawn anew for every case, rank and seed, so that no table holds them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from dtlab.grading import catalogue
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator, normals, numbers, scale, varied, widest
from dtlab.grading.standard import bytes_sent, values
from dtlab.trace import Trace

SEED = 123_456_789_012
OTHER = SEED + 2520 * 7  # has the same remainders as SEED, divided by 2, 3, …, 10
FIXED = {  # exercises in which some cases are the same for all seeds, and why no table helps
    "hello-ranks": "functions are given a communicator, and nothing else",
    "finish-times": "one case has no flows",
    "one-f-one-b": "one case has p = m = 1",
    "shrink": "ranks are told how many die, not who",
    "surviving-checkpoint": "what is saved comes from the referee",
    "overlapped-backward": "the gradients come from the referee",
    "hidden-cluster": "a layout is found by runs, which the referee makes",
}
UNBOUND = {  # exercises whose results may come without a message
    "hello-ranks": "a rank knows its own rank and size",
}


def text(args: object, most: int | None = None) -> str:
    """All that arguments hold; of each vector the first elements, at most so many."""
    return repr(tree_map(
        lambda x: x.flatten()[:most].tolist() if isinstance(x, torch.Tensor | np.ndarray) else x,
        args))


def cases(exercise: str, seed: int) -> list[Case]:
    return [case for check in catalogue()[exercise].build(seed) for case in check.cases]


def empty(case: Case) -> bool:
    """Are there vectors, all without elements?"""
    tensors = [x for x in tree_leaves(case.args) if isinstance(x, torch.Tensor)]
    return bool(tensors) and not any(x.numel() for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64,
                                   torch.int32, torch.int64])
def test_sixteen_of_the_widest_numbers_add_up_exactly(dtype):
    most = widest(1, dtype)
    for number in (most, most - 1):
        total = sum(torch.full((16,), number, dtype=dtype))
        assert int(total.real.item()) == 16 * number
    assert widest(0, dtype) == 9  # shown inputs stay readable


@pytest.mark.parametrize("draw", [
    lambda *of: numbers(of, (20,), torch.float32).tolist(), lambda *of: normals(of, 5)[0].tolist(),
    lambda *of: varied(of[0], 10**9, *of[1:]), lambda *of: generator(*of).random()])
def test_a_draw_is_the_same_again_and_another_for_another_seed_case_or_rank(draw):
    assert draw(7, "case", 1) == draw(7, "case", 1)
    drawn = [draw(*of) for of in ((7, "case", 1), (8, "case", 1), (7, "other", 1), (7, "case", 2),
                                  (7, "case", 11), (7 + 2**64, "case", 1))]
    assert all(a != b for a, b in combinations(drawn, 2))


def test_draws_are_the_same_on_every_machine():
    assert generator(12, "case", 3).integers(1000, size=4).tolist() == [211, 822, 606, 287]
    assert numbers((12, 3), (4,), torch.int64).tolist() == [61, 55, 81, 63]


def test_whole_numbers_are_from_one_to_most():
    assert set(numbers((1,), (500,), torch.bfloat16, most=9).tolist()) == set(range(1, 10))


def test_shown_inputs_are_round_and_others_vary():
    assert [varied(0, 9, "a"), scale(0, "a")] == [0, 1]
    assert {varied(seed, 3) for seed in range(1, 60)} == {0, 1, 2}
    drawn = {scale(seed, "a", most=1.5) for seed in range(1, 200)}
    assert len(drawn) > 150
    assert 1 <= min(drawn) < 1.1 < 1.4 < max(drawn) <= 1.5


@pytest.mark.parametrize("exercise", [each for each in catalogue() if each not in FIXED])
def test_no_remainder_of_the_seed_tells_the_inputs(exercise):
    for a, b in zip(cases(exercise, SEED), cases(exercise, OTHER), strict=True):
        assert empty(a) or text(a.args, 100) != text(b.args, 100), a.tried


@pytest.mark.parametrize("exercise", catalogue())
def test_no_process_of_a_learner_is_given_the_seed(exercise):
    for case in cases(exercise, SEED):
        held = tree_map(lambda x: SEED if isinstance(x, torch.Tensor) and
                        (x.to(torch.complex128) == SEED).any() else x, case.args)
        assert str(SEED) not in text(held, 0), case.tried


@pytest.mark.parametrize("exercise", FIXED)
def test_the_other_exercises_have_equal_cases(exercise):
    """Else they don't belong there."""
    pairs = zip(cases(exercise, SEED), cases(exercise, OTHER), strict=True)
    assert any(text(a.args) == text(b.args) for a, b in pairs)


@pytest.mark.parametrize("exercise", [each for each in catalogue() if each not in UNBOUND])
def test_right_results_that_came_without_a_message_are_wrong(exercise):
    for case in cases(exercise, SEED):
        one_worker = case.facts.get("workers") == 1 or case.facts.get("machines") == ((1,),)
        if case.wanted and case.comm and case.ranks > 1 and not empty(case) and not one_worker:
            right = Outcome(list(case.wanted.returns or [None] * case.ranks),
                            list(case.wanted.args_after or [()] * case.ranks),
                            trace=Trace(case.ranks))
            verdict = values(case, right)
            assert (verdict.passed, verdict.evidence) == (False, "too few bytes"), case.tried


def test_survivors_that_agree_without_a_message_are_wrong():
    for check in catalogue()["shrink"].build(SEED)[:-1]:
        for case in check.cases:
            living = [rank for rank in range(case.ranks) if rank not in case.facts["dies"]]
            right = Outcome([[living] if rank in living else None for rank in range(case.ranks)],
                            trace=Trace(case.ranks), asked=[0] * case.ranks)
            assert check.judge(case, right).passed == (len(living) == 1)


def test_an_empty_message_counts_eight_bytes():
    outcome = Outcome(trace=Trace(2, [(0, 1, n, 0, 0, 0, 1, "") for n in (0, 5, 8, 100)]))
    assert [bytes_sent(outcome), bytes_sent(outcome, 0), bytes_sent(outcome, 1)] == [124, 124, 0]


def test_parts_for_few_ranks_are_none_of_those_for_more():
    firsts = {(case, *case.args[0][0][0].flatten().tolist())
              for case in cases("bruck-all-to-all", SEED) if case.facts["part"]}
    for case, *part in firsts:
        assert sum(part == other for _, *other in firsts) == 1, case.tried


@pytest.mark.parametrize("exercise", ["zero-stage-1", "vocab-loss", "sharded-store",
                                      "hierarchical"])
def test_a_rank_is_given_nothing_twice(exercise):
    """A process serves many cases: what it was told in one must not answer another."""
    checks = catalogue()[exercise].build(SEED)
    given: dict[tuple[object, ...], Case] = {}
    for case in dict.fromkeys(case for check in checks for case in check.cases
                              if not case.gloo and case.ranks > 1):
        for x in tree_leaves(list(case.args[-1])):
            if isinstance(x, torch.Tensor) and x.numel() > 4 and x.any():
                key = (x.dtype, *x.shape, *x.flatten()[:50].tolist())
                assert given.setdefault(key, case) is case
