"""Kill it yourself: three copies of a server, and a moment at which one dies or is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtlab import ps
from dtlab.plots import Picture, replicas
from dtlab.recording import ReplicaRun, replica_run
from dtlab.recording.replica_run import NEVER_S
from dtlab.widgets.explorer import Choice, Explorer, choice, dropdown

RULES: dict[str, ps.Replication] = {
    "chain": ps.Chain(),
    "leader, waits for its followers": ps.Leader(sync=True),
    "leader, answers at once": ps.Leader(sync=False),
}
FATES = ("nothing", "kill copy 0", "kill copy 1", "kill copy 2", "cut copy 0 off")
EVENTS = range(10, 125, 5)  # of the victim: the moments at which it may die
CUTS_S = [moment / 1000 for moment in range(10, 10 + 5 * len(EVENTS), 5)]
HEALS: dict[str, float | None] = {"after 10 ms": 0.01, "after 30 ms": 0.03, "after 50 ms": 0.05,
                                  "not in this picture": None}


class ReplicaExplorer(Explorer):
    """`plots.replicas`, simulated for what is chosen, and kept.

    rule: one of `RULES`; fate: one of `FATES`; moment: where the slider stands, 0 to 22: a victim
    dies at one of its events, a link is cut at a time. heal: one of `HEALS`. Raises `ConfigError`
    for what there isn't.
    """

    def __init__(self, rule: str = "chain", fate: str = "kill copy 0", moment: int = 10,
                 heal: str = "after 30 ms"):
        self._runs: dict[Choice, ReplicaRun] = {}
        self.rule = dropdown("copies", RULES, rule, width="330px")
        self.fate = dropdown("what happens", FATES, fate, width="250px")
        self.moment = choice("when", [(str(n), n) for n in range(len(EVENTS))], moment,
                             width="420px")
        self.heal = dropdown("the link heals", HEALS, heal, width="280px")
        super().__init__([self.rule, self.fate], [self.moment, self.heal])

    @property
    def run(self) -> ReplicaRun:
        """The run that is shown."""
        return self._run(*self._choice())

    def _choice(self) -> Choice:
        fate, moment, heal = self.fate.value, self.moment.value, self.heal.value
        cut = fate.startswith("cut")
        return (self.rule.value, fate, moment if fate != "nothing" else 0,
                heal if cut else "not in this picture")

    def _run(self, *chosen: Any) -> ReplicaRun:
        rule, fate, moment, heal = chosen
        if chosen not in self._runs:
            fates: dict[str, Any] = {}
            if fate.startswith("kill"):
                fates = {"victim": int(fate[-1]), "event": EVENTS[moment]}
            elif fate.startswith("cut"):
                cut_s, heals_s = CUTS_S[moment], HEALS[heal]
                fates = {"cut_s": cut_s,
                         "healed_s": NEVER_S if heals_s is None else cut_s + heals_s}
            self._runs[chosen] = replica_run(RULES[rule], name=rule, **fates)
        return self._runs[chosen]

    def _update(self) -> None:
        fate = self.fate.value
        self.heal.disabled, self.moment.disabled = not fate.startswith("cut"), fate == "nothing"
        super()._update()

    def _near(self) -> Iterator[Choice]:
        rule, fate, moment, heal = self._choice()
        near = [moment + 1, moment - 1, moment + 2, moment - 2] if fate != "nothing" else []
        yield from ((rule, fate, m, heal) for m in near if 0 <= m < len(EVENTS))
        yield from ((other, fate, moment, heal) for other in RULES)
        yield from ((rule, fate, moment, other) for other in HEALS if fate.startswith("cut"))

    def _draw(self, *chosen: Any) -> Picture:
        return replicas(self._run(*chosen))
