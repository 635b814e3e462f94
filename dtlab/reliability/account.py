"""Where the seconds of a long job go: arguments, checks, result."""

from __future__ import annotations

from dataclasses import dataclass

from dtlab import cost
from dtlab.checks import check_amount, check_choice, check_each, check_positive, check_whole, short
from dtlab.errors import ConfigError
from dtlab.reliability.failures import MOST_NODES, Failures
from dtlab.reliability.job import KINDS, TICKS, GoodputOptions, Interval, SimulatedJob

ANSWERS = ("restart", "shrink", "replicas")
MOST_EVENTS = 10_000_000  # some ten seconds
MOST_S = 1e12  # 30,000 years
MONTH_S = 30 * cost.failures.DAY_S


def goodput(
    nodes: int, failures: Failures | float, save_s: float, restart_s: float,
    interval_s: float | None = None, *, answer: str = "restart", duration_s: float = MONTH_S,
    spares: int = 0, repair_s: float = 0.0, copy_s: float | None = None,
    copy_restart_s: float | None = None, group: int = 1, ranks_per_node: int = 1, seed: int = 0,
) -> Goodput:
    """Play a job of `nodes` nodes for `duration_s` seconds, and account for every rank-second.

    failures: a `Failures`, or a number: failures a node and day, exponential.
    interval_s: seconds of work from save to save; None: Daly's best for these failures.
    save_s: everyone stops so long to save. A failure during a save leaves the one before.
    answer: to a failure.
        "restart": all stop until a spare or repaired node is in every place, then load for
        `restart_s`, and do again what was not saved. A failure meanwhile begins the restart anew.
        "shrink": those left load for `restart_s` and go on, in proportion slower, until a node
        comes back; then all load again, and nothing is done again.
        "replicas": each `group` nodes hold a whole model. A group that loses a node is absent until
        its node is replaced and it has loaded, for `restart_s`, from a peer; the others go on. If
        no group is left, the last save counts.
    spares, repair_s: nodes beside the job's, which don't fail while idle; and how long a failed one
        is away. Zero seconds: the node itself starts again.
    copy_s: seconds of work between two copies of the state in the memory of the next node, which
        cost nothing; None: there are none. Work since the last one is done again, after
        `copy_restart_s` (default: restart_s), unless a node and its copy's holder are lost before
        all have recovered: then from disk. Replicas: the length of a step, which a failure voids.
    seed: equal arguments give equal results, on any machine.

    Every rank-second is *productive* (work done for the first time), *redone*, *blocked* (saving,
    loading, waiting for others), or *absent* (a place without node, a group that heals). Failures
    strike at all times. Raises `ConfigError` for arguments that make no sense.

    >>> month = goodput(1500, 0.0065, save_s=10, restart_s=300)
    >>> f"{month.share:.3f} productive; Daly's model: {month.closed_form:.3f}"
    "0.919 productive; Daly's model: 0.922"
    """
    check_whole("nodes", nodes, most=MOST_NODES)
    if not isinstance(failures, Failures):
        failures = Failures(failures)
    copy_restart_s = restart_s if copy_restart_s is None else copy_restart_s
    for name, value in (("save_s", save_s), ("restart_s", restart_s), ("repair_s", repair_s),
                        ("interval_s", 0 if interval_s is None else interval_s),
                        ("copy_s", 0 if copy_s is None else copy_s),
                        ("copy_restart_s", copy_restart_s), ("duration_s", duration_s)):
        check_amount(name, value)
        if value > MOST_S:
            raise ConfigError(f"{name} must be at most {MOST_S:g} seconds, not {short(value)}")
    if duration_s * TICKS < 1:
        raise ConfigError(f"duration_s must be a microsecond or more, not {short(duration_s)}")
    check_whole("spares", spares, 0, MOST_NODES)
    check_each(check_whole, group=group, ranks_per_node=ranks_per_node)
    check_whole("seed", seed, least=0)
    check_choice("answer", answer, ANSWERS)
    if nodes % group or (group > 1 and answer != "replicas"):
        raise ConfigError(f"group is for replicas, and divides the {nodes} nodes; not {group}")
    if any(place not in range(nodes) for _, places in failures.at for place in places):
        raise ConfigError(f"failures strike the places 0 to {nodes - 1}")
    expected = failures.expected(nodes, duration_s)
    mttf_s = duration_s / max(1e-9, expected)
    if interval_s is None:
        if not save_s:
            raise ConfigError("with save_s=0 the shortest interval is the best; give interval_s")
        interval_s = min(duration_s, cost.daly_interval_s(save_s, mttf_s))
    check_positive("interval_s", interval_s)
    if expected + duration_s / (interval_s + save_s) > MOST_EVENTS:
        raise ConfigError(f"{expected:.3g} failures and {duration_s / (interval_s + save_s):.3g} "
                          f"saves take too long to play; at most {MOST_EVENTS:,}")
    ticks = [round(seconds * TICKS) for seconds in (
        save_s, restart_s, max(interval_s, 1 / TICKS), duration_s, repair_s, copy_restart_s)]
    save, restart, interval, duration, repair, copy_restart = ticks
    job = SimulatedJob(GoodputOptions(
        nodes, failures, save, restart, interval, answer, duration, spares, repair,
        None if copy_s is None else round(copy_s * TICKS), copy_restart, group, seed))
    job.run()
    return Goodput(job.options, ranks_per_node, mttf_s, job.ticks, job.failures, job.restarts,
                   job.timeline)


@dataclass(frozen=True)
class Goodput:
    """A job's rank-seconds, by what became of them.

    mttf_s: the mean time to failure that was expected of the job. failures: events that struck it.
    restarts: how often all loaded, or a group. timeline: the first 10,000 intervals; `row` gives
    one place's.
    """

    options: GoodputOptions
    ranks_per_node: int
    mttf_s: float
    ticks: dict[str, int]  # node-microseconds of each kind
    failures: int
    restarts: int
    timeline: list[Interval]

    @property
    def seconds(self) -> dict[str, float]:
        """Rank-seconds of each kind."""
        return {kind: self.ticks[kind] * self.ranks_per_node / TICKS for kind in KINDS}

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind; the four are 1."""
        total = self.options.nodes * self.options.duration
        return {kind: self.ticks[kind] / total for kind in KINDS}

    @property
    def share(self) -> float:
        """The goodput: the share of rank-seconds that is productive."""
        return self.shares["productive"]

    interval_s = property(lambda self: self.options.interval / TICKS)
    save_s = property(lambda self: self.options.save / TICKS)
    restart_s = property(lambda self: self.options.restart / TICKS)
    duration_s = property(lambda self: self.options.duration / TICKS)

    @property
    def closed_form(self) -> float | None:
        """The share by Daly's model; None for options that it doesn't cover: it knows restarts from
        disk, at once, after exponential failures that strike one node each."""
        options = self.options
        plain = Failures(options.failures.per_node_day)
        if (options.failures != plain or not plain.per_node_day or options.answer != "restart"
                or options.repair or options.copy is not None):
            return None
        return cost.useful_share(self.interval_s, self.save_s, self.restart_s, self.mttf_s)

    @property
    def difference(self) -> float | None:
        """The simulated share less the closed form's; None where there is none."""
        return None if self.closed_form is None else self.share - self.closed_form

    def row(self, place: int) -> list[tuple[float, float, str]]:
        """(start, end, kind) of one place, in seconds."""
        check_whole("place", place, 0, self.options.nodes - 1)
        row: list[tuple[float, float, str]] = []
        for start_s, end_s, kind, absent in self.timeline:
            now = "absent" if place in absent else kind
            if row and row[-1][2] == now:
                start_s = row.pop()[0]
            row.append((start_s, end_s, now))
        return row

    def __repr__(self) -> str:
        parts = ", ".join(f"{share:.1%} {kind}" for kind, share in self.shares.items())
        return (f"Goodput({self.options.nodes:,} nodes, {self.duration_s:,.0f} s: {parts}; "
                f"{self.failures:,} failures, {self.restarts:,} restarts)")
