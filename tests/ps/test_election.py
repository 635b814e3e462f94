"""Elections among copies without a master: `dtlab.ps.election`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dtlab import run, simulate
from dtlab.ps.election import Led, elect
from dtlab.topology import Topology, uniform, with_link

RANKS = [*range(1, 10), 13]


def terms(network: Topology, seed: int = 0, until_s: float = 1.5, **options: object
          ) -> dict[int, tuple[int, Led]]:
    """term → who led it, and when. Fails if two led the same term."""
    values = simulate(elect, until_s, seed, network=network, trace=False, **options).values
    led = [(one.term, rank, one) for rank, found in enumerate(values) for one in found or ()]
    assert len({term for term, _, _ in led}) == len(led), "two leaders of one term"
    return {term: (rank, one) for term, rank, one in sorted(led)}


def without(copies: list[int], network: Topology, from_s: float, until_s: float) -> Topology:
    """These copies are cut off for a while, from each other, too."""
    for copy in copies:
        network = with_link(network, copy, "switch", bandwidth_Bps=0, at_s=from_s)
        network = with_link(network, copy, "switch", bandwidth_Bps=1e9, at_s=until_s)
    return network


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_leader_is_found_and_stays(ranks: int, seed: int) -> None:
    found = terms(uniform(ranks, 1e-3, 1e9), seed)
    (_, last) = found[max(found)]
    assert last.from_s < 1.0
    assert last.until_s >= 1.5


@pytest.mark.parametrize("seed", range(5))
def test_after_a_leaders_death_the_others_elect_another(seed: int) -> None:
    network = uniform(5, 1e-3, 1e9)
    ((first, _),) = terms(network, seed).values()
    after = terms(network, seed, crash={first: 60})
    last, led = after[max(after)]
    assert last != first
    assert led.until_s >= 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_was_cut_off_steps_down_when_it_hears_of_a_later_term(seed: int) -> None:
    network = uniform(5, 1e-3, 1e9)
    ((first, _),) = terms(network, seed).values()
    (old, was), (new, led), *rest = terms(without([first], network, 0.6, 1.2), seed).values()
    assert (old, rest) == (first, [])
    assert new != first
    assert led.from_s < was.until_s  # for a while both lead, each a term of its own
    assert was.until_s == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize(("ranks", "cut"), [(3, 2), (4, 2), (5, 3), (6, 3)])
def test_less_than_a_majority_elects_nobody(ranks: int, cut: int) -> None:
    network = without(list(range(cut)), uniform(ranks, 1e-3, 1e9), 1e-6, 3.0)
    assert not terms(network)


def test_each_leader_has_a_later_term_than_the_one_before() -> None:
    network = uniform(5, 1e-3, 1e9)
    for seed in range(5):
        ((first, _),) = terms(network, seed).values()
        found = terms(without([first], network, 0.5, 0.9), seed, until_s=2.0)
        assert all(a.from_s < b.from_s for (_, a), (_, b) in pairwise(found.values()))


def test_copies_that_wait_equally_long_elect_nobody() -> None:
    values = simulate(elect, 1.5, 0, (0.15, 0.15), network=uniform(5, 5e-3, 1e9)).values
    assert values == [[]] * 5


def test_on_processes_no_term_has_two_leaders() -> None:
    led = [one for found in run(elect, 1.0, ranks=3, trace=False).values for one in found]
    assert len({one.term for one in led}) == len(led)
