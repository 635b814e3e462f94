"""The curve of the critical batch: what it says at its ends, and that the fit finds it again."""

from __future__ import annotations

import pytest

from dtlab import ConfigError, cost


@pytest.mark.parametrize(("least", "critical"), [(30, 13), (1, 1), (5000, 2.5e6), (7.5, 0.3)])
def test_at_the_critical_batch_steps_and_samples_are_twice_their_least(
        least: float, critical: float) -> None:
    assert cost.steps_to_loss(critical, least, critical) == pytest.approx(2 * least)
    assert cost.steps_to_loss(1e12 * critical, least, critical) == pytest.approx(least)
    smallest = 1e-9 * critical
    samples = smallest * cost.steps_to_loss(smallest, least, critical)
    assert samples == pytest.approx(least * critical)
    assert critical * cost.steps_to_loss(critical, least, critical) == pytest.approx(2 * samples)


@pytest.mark.parametrize(("least", "critical"), [(30, 13), (1, 1), (5000, 2.5e6)])
def test_the_fit_finds_the_curve_that_counts_lie_on(least: float, critical: float) -> None:
    counts = {batch: cost.steps_to_loss(batch, least, critical) for batch in (1, 3, 16, 999)}
    assert cost.fit_critical_batch(counts) == pytest.approx((least, critical), rel=1e-6)


def test_the_fit_weighs_what_is_off_in_parts_of_each_count() -> None:
    """A tenth more of many steps is worth a tenth more of few."""
    curve = {batch: cost.steps_to_loss(batch, 30, 16) for batch in (2, 8, 32, 128)}
    fits = [cost.fit_critical_batch(curve | {batch: 1.1 * curve[batch]}) for batch in (2, 128)]
    for least, critical in fits:
        assert 0.9 < least / 30 < 1.1
        assert 0.85 < critical / 16 < 1.15


@pytest.mark.parametrize("steps", [{}, {16: 52}, {16: 38, 64: 52}, {0: 5, 4: 3}, {4: 40, 16: 1}])
def test_counts_that_do_not_fit_are_named(steps: dict[int, float]) -> None:
    with pytest.raises(ConfigError):
        cost.fit_critical_batch(steps)
