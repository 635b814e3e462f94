"""The fastest layouts, by model, cluster, a device's memory, and the order of the axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import permutations

from dtlab.comm import Comm
from dtlab.models import SHAPES
from dtlab.parallel.mesh import groups
from dtlab.parallel.planner import DEVICES, HEADROOM, Layout, Plan, plan, wires
from dtlab.parallel.planner.device import servers
from dtlab.parallel.planner.wires import wire_of
from dtlab.plots import Picture
from dtlab.plots.plans import no_plan, plans
from dtlab.result import Result
from dtlab.simulator import simulate
from dtlab.topology import Topology, compose, nvswitch, uniform
from dtlab.trace import Trace
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Choice, Explorer, dropdown, number_slider
from dtlab.widgets.run_and_stop import RunAndStop
from dtlab.widgets.timeline import TimelineExplorer

CLUSTERS = {
    "16 A100, a card each": servers("a100", 2),
    "64 A100, a card each": servers("a100", 8),
    "64 H100, a card each": servers("h100", 8),
    "64 A100, a card a server": compose(nvswitch(8), uniform(8, 3e-6, 25e9), nic_Bps=25e9),
}
ORDERS = {"the best": (), **{", ".join(order): order for order in permutations(("pp", "dp", "tp"))}}
SHOWN = 6
_DEVICES = (16e9, 24e9, 40e9, 80e9, 141e9)


class PlanExplorer(Explorer):
    """`plots.plans` of `parallel.plan`, with controls.

    model: one of `dtlab.models.SHAPES`. clusters: yours, beside `CLUSTERS`; cluster: one of all.
    batch: samples a step. memory_bytes: of a device. Raises `ConfigError` for what doesn't exist.
    """

    def __init__(self, model: str = "7.5 B", cluster: str = "16 A100, a card each",
                 batch: int = 64, memory_bytes: float = 80e9,
                 clusters: Mapping[str, Topology] | None = None):
        self.clusters = {**CLUSTERS, **(clusters or {})}
        self.batch = batch
        self.model = dropdown("model", SHAPES, model)
        self.cluster = dropdown("cluster", self.clusters, cluster, width="270px")
        self.order = dropdown("axes, the last one nearest", ORDERS, "the best", width="300px")
        self._plans = cache(self._planned)
        self._plans(model, cluster)  # may raise
        self.memory = number_slider("device", _DEVICES, memory_bytes, bytes_text, width="300px")
        choices = [self.model, self.cluster, self.order, self.memory]
        self.buttons = RunAndStop("▶ simulate the best", "one step of the first bar, as messages",
                                  self._begin, self._end, choices)
        self._simulated: dict[tuple[str, str, float, str], tuple[float, TimelineExplorer]] = {}
        super().__init__(choices[:3], [self.memory, *self.buttons.controls])

    def best(self) -> list[Plan]:
        """The plans that are shown: of those that differ in the order of axes only, and take the
        same, the first."""
        limit, order = self.memory.value, ORDERS[self.order.value]
        fit = (p for p in self._plans(self.model.value, self.cluster.value)
               if p.memory_bytes <= (1 - HEADROOM) * limit and (
                   not order or list(p.layout.mesh) == [a for a in order if a in p.layout.mesh]))
        shown: dict[object, Plan] = {}
        for p in fit:
            mesh, *rest = p.layout
            shown.setdefault((frozenset(mesh.items()), *rest, f"{p.step_s:.4g}"), p)
            if len(shown) == SHOWN:
                break
        return list(shown.values())

    def _planned(self, model: str, cluster: str) -> list[Plan]:
        """All layouts, without a limit of memory."""
        def usual(layout: Layout) -> bool:
            return layout.micro_batch <= 4 and layout.schedule != "gpipe" and layout.stage != 2

        device = DEVICES["h100" if "H100" in cluster else "a100"]
        return plan(SHAPES[model], self.clusters[cluster], self.batch, 1e15, device=device,
                    only=usual)

    def _now(self) -> tuple[str, str, float, str]:
        return self.model.value, self.cluster.value, self.memory.value, self.order.value

    def _choice(self) -> Choice:
        simulated_s, *_ = self._simulated.get(self._now(), (None,))
        return *self._now(), simulated_s

    def _draw(self, model: str, cluster: str, memory_bytes: float, order: str,
              simulated_s: float | None) -> Picture:
        best, title = self.best(), f"{model} on {cluster}"
        if not best:
            nearest = min(self._plans(model, cluster), key=lambda p: p.memory_bytes)
            return no_plan(title, f"nothing fits {bytes_text(memory_bytes)}; the nearest, "
                                  f"{nearest.layout}, needs {bytes_text(nearest.memory_bytes)}",
                           SHOWN)
        mesh, wire = best[0].layout.mesh, wires(self.clusters[cluster])
        speeds = ", ".join(f"{axis} {bytes_text(1 / wire_of(mesh, axis, wire).beta)}/s"
                           for axis in mesh if mesh[axis] > 1)
        picture = plans(best, title, f"{self.batch} samples a step · a ring of the first: {speeds}",
                        [simulated_s], rows=SHOWN)
        enough = max(p.memory_bytes for p in best) / (1 - HEADROOM)
        picture.alt += (f" All of them fit a device of {bytes_text(enough)}, of which "
                        f"{HEADROOM:.0%} stay free; with less memory, some no longer fit.")
        return picture

    def _begin(self) -> Callable[[], Result] | None:
        from dtlab.processes import run  # processes are launched by Run buttons only

        if not (best := self.best()):
            return None
        self._say("One step is simulated. The more layers and devices, the longer it takes, "
                  "at most a minute or two; Stop ends it.")
        # In a process of its own, for it changes torch's random numbers, which other cells may use.
        return partial(run, _simulated, best[0], self.clusters[self.cluster.value], ranks=1,
                       timeout=None, echo=False)

    def _end(self, outcome: Result | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._say(str(outcome) or type(outcome).__name__, alarm=True)
            return
        self._say("The step is simulated; its timeline is being drawn.")
        ((seconds, trace),), layout = outcome.values, self.best()[0].layout
        step = TimelineExplorer(trace, f"A step of {layout}", _shown_ranks(layout))
        self._simulated[self._now()] = seconds, step
        self._update()

    def _update(self) -> None:
        super()._update()
        _, *step = self._simulated.get(self._now(), (None,))
        parts = self.box.children
        self.box.children = (*parts[: parts.index(self.words) + 1], *step)


def _shown_ranks(layout: Layout) -> list[int]:
    """The first rank of each stage; without a pipeline, eight ranks."""
    if layout.pp > 1:
        return groups(layout.mesh, "pp")[0]
    return list(range(min(8, layout.dp * layout.tp)))


def _simulated(_: Comm, best: Plan, network: Topology) -> tuple[float, Trace]:
    """Simulate a step: return its seconds, and a trace without its messages, which are too many to
    be drawn."""
    ran = simulate(best.step, network=network)
    trace = ran.trace
    return ran.elapsed_s, Trace(trace.ranks, (), trace.spans, waits=trace.waits, virtual=True)
