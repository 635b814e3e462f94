"""Kill it yourself: three copies of a server, and a moment at which one dies or is cut off."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from dtlab import ps
from dtlab.errors import ConfigError
from dtlab.plots import Picture, replicas
from dtlab.recording import ReplicaRun, replica_run
from dtlab.recording.replica_run import NEVER_S
from dtlab.widgets.explorer import Explorer, choice, dropdown

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
Choice = tuple[str, str, int, str]  # copies, what happens, when, when it heals


class ReplicaExplorer(Explorer):
    """`plots.replicas`, simulated for what is chosen, and kept.

    rule: one of `RULES`; fate: one of `FATES`; moment: where the slider stands, 0 to 22: a victim
    dies at one of its events, a link is cut at a time. heal: one of `HEALS`. Raises `ConfigError`
    for what there isn't.
    """

    def __init__(self, rule: str = "chain", fate: str = "kill copy 0", moment: int = 10,
                 heal: str = "after 30 ms"):
        for name, known in ((rule, RULES), (fate, FATES), (heal, HEALS),
                            (moment, range(len(EVENTS)))):
            if name not in known:
                raise ConfigError(f"unknown {name!r}; there are: {', '.join(map(str, known))}")
        self._runs: dict[Choice, ReplicaRun] = {}
        self.rule = dropdown("copies", list(RULES), rule, width="330px")
        self.fate = dropdown("what happens", FATES, fate, width="250px")
        self.moment = choice("when", [(str(n), n) for n in range(len(EVENTS))], moment,
                             width="420px")
        self.heal = dropdown("the link heals", list(HEALS), heal, width="280px")
        super().__init__([self.rule, self.fate], [self.moment, self.heal])
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")
        self._update()

    @property
    def run(self) -> ReplicaRun:
        """The run that is shown."""
        return self._run(*self._choice())

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        return replicas(self.run)

    def _choice(self) -> Choice:
        fate, moment, heal = self.fate.value, self.moment.value, self.heal.value
        cut = fate.startswith("cut")
        return (self.rule.value, fate, moment if fate != "nothing" else 0,
                heal if cut else "not in this picture")

    def _run(self, rule: str, fate: str, moment: int, heal: str) -> ReplicaRun:
        chosen = rule, fate, moment, heal
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
        now = self._choice()
        cut = now[1].startswith("cut")
        self.heal.disabled, self.moment.disabled = not cut, now[1] == "nothing"
        self._show(now, partial(self._draw, *now))
        self._prepare(now, self._neighbours(now))

    def _neighbours(self, now: Choice) -> list[Choice]:
        """List the choices one move of one control away, the likeliest first."""
        rule, fate, moment, heal = now
        near = [moment + 1, moment - 1, moment + 2, moment - 2] if fate != "nothing" else []
        heals = list(HEALS) if fate.startswith("cut") else []
        return [*((rule, fate, m, heal) for m in near if 0 <= m < len(EVENTS)),
                *((other, fate, moment, heal) for other in RULES if other != rule),
                *((rule, fate, moment, other) for other in heals if other != heal)]

    def _prepare(self, now: Choice, ahead: list[Choice]) -> None:
        """Draw one picture ahead after the other, so that the kernel may answer in between; none
        any more once something else is chosen."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel: a script or a test
            return
        if ahead and now == self._choice():
            loop.call_later(0.03, self._prepare_one, now, ahead)

    def _prepare_one(self, now: Choice, ahead: list[Choice]) -> None:
        if now == self._choice():
            self._drawn(ahead[0], partial(self._draw, *ahead[0]))
            self._prepare(now, ahead[1:])

    def _draw(self, rule: str, fate: str, moment: int, heal: str) -> Picture:
        return replicas(self._run(rule, fate, moment, heal))
