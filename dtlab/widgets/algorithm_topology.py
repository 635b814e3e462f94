"""A widget of all-reduces on wires: choose cluster, size and algorithm; see the links filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from dtlab.errors import ConfigError
from dtlab.plots import Picture, contest_on
from dtlab.topology import Topology
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Explorer, choice, dropdown
from dtlab.wires import ContestEntry, contest, examples

Choice = tuple[str, int, str]  # cluster, bytes, algorithm


class AlgorithmTopologyExplorer(Explorer):
    """`plots.contest_on`, with a list of clusters, a slider of sizes, and a list of algorithms.

    clusters: name → topology (None: `wires.examples`). entries: what `wires.contest` gave for them,
    so that nothing is simulated twice; None: it is held now, in a few seconds. Raises `ConfigError`
    unless each cluster has the same sizes and algorithms among the entries.
    """

    def __init__(self, clusters: Mapping[str, Topology] | None = None,
                 entries: Sequence[ContestEntry] | None = None):
        self.clusters = dict(examples() if clusters is None else clusters)
        self._entries: defaultdict[tuple[str, int], list[ContestEntry]] = defaultdict(list)
        for entry in contest(self.clusters) if entries is None else entries:
            self._entries[entry.cluster, entry.nbytes].append(entry)
        sizes = sorted({nbytes for _, nbytes in self._entries})
        lists = {tuple(e.algorithm for e in self._entries.get((name, nbytes), ()))
                 for name in self.clusters for nbytes in sizes}
        if len(lists) != 1 or lists == {()}:
            raise ConfigError("each cluster needs entries of the same sizes and algorithms; "
                              "take those of one wires.contest(clusters)")
        algorithms = lists.pop()
        self.cluster = dropdown("cluster", list(self.clusters), next(iter(self.clusters)), "320px")
        self.algorithm = dropdown("links of", algorithms, algorithms[0])
        self.nbytes = choice("size", [(bytes_text(n), n) for n in sizes], sizes[-1])
        super().__init__([self.cluster, self.algorithm], [self.nbytes])
        self._update()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")

    def static(self) -> Picture:
        """The picture that is shown, as a matplotlib figure."""
        return self._draw(self._choice())

    def _choice(self) -> Choice:
        return self.cluster.value, self.nbytes.value, self.algorithm.value

    def _update(self) -> None:
        now = self._choice()
        self._show(now, partial(self._draw, now))
        sizes = [nbytes for _, nbytes in self.nbytes.options]
        at = sizes.index(now[1])
        for near in sizes[max(0, at - 1):at] + sizes[at + 1:at + 2]:
            key = now[0], near, now[2]
            self._ahead(key, partial(self._draw, key))

    def _draw(self, which: Choice) -> Picture:
        cluster, nbytes, algorithm = which
        return contest_on(self.clusters[cluster], self._entries[cluster, nbytes], algorithm)
