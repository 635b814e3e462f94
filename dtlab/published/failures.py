"""Published results on failures, beside our closed forms and our simulation."""

from __future__ import annotations

from functools import partial

from dtlab import cost
from dtlab.cost.failures import DAY_S
from dtlab.published.figure import DISAGREE, MATCH, Published
from dtlab.reliability import goodput

META = "Kokolis et al. (Meta), 2024, arXiv 2410.21680"
LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2024, table 5"
PER_NODE_DAY = 6.5 / 1000  # Meta's failures of a node of 8 GPUs
# Table 5 of Llama 3's paper: unexpected interruptions on 16,384 GPUs in 54 days; 5 more kinds of 2.
INTERRUPTIONS = {
    "faulty GPU": 148, "GPU HBM3 memory": 72, "software bug": 54, "network switch or cable": 35,
    "host maintenance": 32, "GPU SRAM memory": 19, "GPU system processor": 17, "NIC": 7,
    "NCCL watchdog timeouts": 7, "silent data corruption": 6, "GPU thermal interface and sensor": 6,
    "SSD": 3, "power supply": 3, "five more kinds": 10}


def _job_mttf_s(gpus: int) -> float:
    return cost.job_mttf_s(gpus / 8, PER_NODE_DAY)


def _mttf(gpus: int, unit_s: float) -> float:
    return _job_mttf_s(gpus) / unit_s


def _ettr(restart_s: float) -> float:
    mttf_s = _job_mttf_s(12_000)
    return cost.ettr(cost.young_interval_s(10, mttf_s), 10, restart_s, mttf_s)


def _played_ettr(restart_s: float) -> float:
    interval_s = cost.young_interval_s(10, _job_mttf_s(12_000))
    return goodput(1500, PER_NODE_DAY, 10, restart_s, interval_s, duration_s=365 * DAY_S).share


def _played_torchft() -> float:
    """30 groups, a failure a minute among them, steps of 10.9 s; a group is away for as long as
    leaves 29.6 of 30 on average, 0.4 · 60 s."""
    return goodput(30, 1440 / 30, 0, 24, DAY_S, answer="replicas", copy_s=10.9,
                   duration_s=10 * DAY_S).share


def _meta() -> list[Published]:
    rows = [Published(META, f"mean time to failure, {gpus:,} GPUs", printed, "hours",
                      partial(_mttf, gpus, 3600), 0.005)
            for gpus, printed in ((16_384, 1.80), (131_072, 0.23))]
    rows += [Published(META, f"measured, {gpus:,} GPUs (1/N does not hold)", printed, unit,
                       partial(_mttf, gpus, s), 0.05 * printed, DISAGREE)
             for gpus, printed, unit, s in ((1024, 7.9, "hours", 3600), (8, 47.7, "days", DAY_S))]
    rows += [Published(META, f"useful share, 12,000 GPUs, restart {minutes} min", printed, "share",
                       partial(_ettr, 60 * minutes), 0.0005)
             for minutes, printed in ((5, 0.921), (10, 0.887), (20, 0.821))]
    rows += [Published(META, f"the same, {minutes} min, simulated for a year", printed, "share",
                       partial(_played_ettr, 60 * minutes), 0.01, verdict)
             for minutes, printed, verdict in ((5, 0.921, MATCH), (10, 0.887, MATCH),
                                               (20, 0.821, DISAGREE))]
    return rows


def failure_rows() -> list[Published]:
    """Return all rows."""
    total = sum(INTERRUPTIONS.values())
    gpu = sum(INTERRUPTIONS[kind] for kind in (
        "faulty GPU", "GPU HBM3 memory", "GPU SRAM memory", "GPU system processor",
        "silent data corruption", "GPU thermal interface and sensor"))
    torchft, trap = "torchft, pytorch.org blog, 300 L40S", "definitions in arXiv 2602.00277"
    return [
        *_meta(),
        Published(LLAMA_3, "unexpected interruptions, added up", 419, "", lambda: total, 0),
        Published(LLAMA_3, "time between two of them, 54 days", 3.09, "hours",
                  lambda: 54 * 24 / total, 0.005),
        Published(LLAMA_3, "faulty GPUs", 30.1, "%",
                  lambda: 100 * INTERRUPTIONS["faulty GPU"] / total, 0.05, DISAGREE),
        Published(LLAMA_3, "all kinds of GPU trouble", 58.7, "%", lambda: 100 * gpu / total, 0.05,
                  DISAGREE),
        Published(torchft, "a failure a minute: 5,145 of 6,249 commits × 29.6 of 30 groups", 81.2,
                  "%", lambda: 100 * 5145 / 6249 * 29.6 / 30, 0.05),
        Published(torchft, "the same, replicas simulated for ten days", 81.2, "%",
                  lambda: 100 * _played_torchft(), 2.0),
        Published(trap, "18 min between failures in wall time, 10 to recover", 44, "%",
                  lambda: 100 * (18 - 10) / 18, 0.5),
        Published(trap, "18 min of uptime between failures, 10 to recover", 64, "%",
                  lambda: 100 * 18 / (18 + 10), 0.5),
        Published("DLRover", "days with a failure: 1,000 cards, 0.27 % a card and day", 93, "%",
                  lambda: 100 * (1 - (1 - 0.0027) ** 1000), 0.5),
        Published("OPT-175B's log", "lost: 178,000 GPU-hours of 992 GPUs in 61 days", 12.3, "%",
                  lambda: 100 * 178_000 / (992 * 24 * 61), 0.05),
    ]
