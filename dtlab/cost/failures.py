"""The cost of failures for a job that saves, dies and restarts: closed forms.

One word in all of them: the *interval* is the seconds of work from one save to the next, the save
not included (Daly's τ). The *period*, interval + save, is what some papers call the interval.
"""

from __future__ import annotations

import math

from dtlab.checks import check_amount, check_each, check_positive
from dtlab.errors import ConfigError

DAY_S = 86_400


def job_mttf_s(nodes: float, per_node_day: float | None = None, *,
               node_mttf_s: float | None = None) -> float:
    """Mean seconds to the first failure of a job that needs all of its `nodes`: 86,400/(N·r), with
    r failures a node and day; or node_mttf_s/N, with one node's mean time to failure.

    Holds if nodes fail independently of each other, at the same constant rate (their times to
    failure are exponential), and nothing else stops the job. Source: Kokolis et al. 2024,
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv 2410.21680).

    >>> f"{job_mttf_s(16_384 / 8, 6.5 / 1000) / 3600:.2f} hours"
    '1.80 hours'
    """
    check_positive("nodes", nodes)
    if (per_node_day is None) == (node_mttf_s is None):
        raise ConfigError("job_mttf_s takes either per_node_day or node_mttf_s")
    if per_node_day is not None:
        check_positive("per_node_day", per_node_day)
        node_mttf_s = DAY_S / per_node_day
    check_positive("node_mttf_s", node_mttf_s)
    assert node_mttf_s is not None
    return node_mttf_s / nodes


def young_interval_s(save_s: float, mttf_s: float) -> float:
    """Seconds of work between saves that lose the least time, to first order: √(2·save·MTTF).

    A period c costs save/c for saving and c/(2·MTTF) for work done again, of each second; this c
    has the least sum. Holds for save ≪ c ≪ MTTF, where interval and period are nearly one.
    Source: Young 1974; "least lost time" in Saxena et al. 2024 (arXiv 2410.18124).
    """
    _check(save_s=save_s, mttf_s=mttf_s)
    return math.sqrt(2 * save_s) * math.sqrt(mttf_s)


def daly_interval_s(save_s: float, mttf_s: float) -> float:
    """Seconds of work between saves for which `useful_share` is largest, two terms further than
    Young: √(2wM)·(1 + √(w/2M)/3 + (w/2M)/9) − w, with w = save_s and M = mttf_s, for w < 2M; else
    M. `restart_s` plays no part.

    The share that it gives is within 0.2 % of the best one for w < 2M, 2 in 10⁵ for w ≤ M/2.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22(3).
    """
    _check(save_s=save_s, mttf_s=mttf_s)
    ratio = save_s / (2 * mttf_s)
    if ratio >= 1:
        return float(mttf_s)
    return young_interval_s(save_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def wall_time_s(work_s: float, interval_s: float, save_s: float, restart_s: float, mttf_s: float
                ) -> float:
    """Expected seconds until `work_s` seconds of work are done and saved: with w = save_s and M =
    mttf_s, M·e^(restart/M)·(e^((interval + w)/M) − 1)·work/interval.

    Exact if failures come at a constant rate 1/M at all times, also during work, save and restart,
    if a failed restart begins again, and if work is a multiple of the interval.
    Source: Daly 2006.
    """
    check_positive("work_s", work_s)
    share = useful_share(interval_s, save_s, restart_s, mttf_s)
    return work_s / share if share else math.inf


def useful_share(interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """The share of all time that is work done for the first time, 0 to 1: work/`wall_time_s`.

    Exact under the same conditions, over a long run.

    >>> f"{useful_share(421, 10, 300, 8861.5):.3f}"
    '0.922'
    """
    _check(save_s=save_s, mttf_s=mttf_s, restart_s=restart_s, interval_s=interval_s)
    period_s = interval_s + save_s
    failures = period_s / mttf_s  # in a period
    if failures > 700:  # e^700: it never gets through
        return 0.0
    survives = failures / math.expm1(failures) if failures else 1.0
    return interval_s / period_s * survives * math.exp(-restart_s / mttf_s)


def ettr(interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """Meta's expected training-time ratio: (1 − (restart + interval/2)/MTTF)/(1 + save/interval).

    With MTTF = 1/(N·r) this is (1 − N·r(u₀ + Δ/2))/(1 + w/Δ), `useful_share` to first order in
    restart and interval over MTTF: too low where a restart is no small part of MTTF, and too high
    by about save/(2·MTTF) of itself, because it leaves out failures during a save.
    Range: restart + interval/2 < MTTF; `ConfigError` beyond.
    Source: Kokolis et al. 2024 (arXiv 2410.21680).
    """
    _check(save_s=save_s, mttf_s=mttf_s, restart_s=restart_s, interval_s=interval_s)
    lost = (restart_s + interval_s / 2) / mttf_s
    if lost >= 1:
        raise ConfigError(f"ettr holds where a failure costs less than the {mttf_s:g} s to the "
                          f"next one; here it costs {restart_s + interval_s / 2:g} s")
    return (1 - lost) / (1 + save_s / interval_s)


def availability(interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """The share of time that is new work if no failure strikes while the job restarts or does work
    again: (1 − save/c)·MTTF/(MTTF + restart + c/2), with the period c = interval + save.

    Restarting and redoing are downtime here, as in uptime/(uptime + downtime), and MTTF is uptime
    between failures. Exact under that condition, for a constant rate of failures; failures that
    strike at all times give `useful_share`. Its maximum is `availability_interval_s`.
    """
    _check(save_s=save_s, mttf_s=mttf_s, restart_s=restart_s, interval_s=interval_s)
    period_s = interval_s + save_s
    return interval_s / period_s * mttf_s / (mttf_s + restart_s + period_s / 2)


def availability_interval_s(save_s: float, restart_s: float, mttf_s: float) -> float:
    """Seconds of work between saves for which `availability` is largest: √(2(T_f + T_r)T_s + T_s²).

    Printed as a period, T_s + that root, in Saxena et al. 2024 (arXiv 2410.18124). Derivation: the
    derivative of (1 − T_s/c)/(T_f + T_r + c/2) is zero where c² − 2T_s·c − 2(T_f + T_r)T_s = 0.
    It grows with the restart T_r, for the clock of failures stands still during it; those of
    Young and Daly, under failures at all times, do not.
    """
    _check(save_s=save_s, mttf_s=mttf_s, restart_s=restart_s)
    return math.sqrt(save_s) * math.sqrt(2 * (mttf_s + restart_s) + save_s)


def _check(save_s: float, mttf_s: float, restart_s: float = 0.0, interval_s: float = 1.0) -> None:
    check_each(check_amount, save_s=save_s, restart_s=restart_s)
    check_each(check_positive, mttf_s=mttf_s, interval_s=interval_s)
