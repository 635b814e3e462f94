"""A widget of all-reduces on wires: choose cluster, size and algorithm; see the links filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dtlab.errors import ConfigError
from dtlab.plots import Picture, contest_on
from dtlab.topology import Topology
from dtlab.units import bytes_text
from dtlab.widgets.explorer import Choice, Explorer, choice, dropdown, values_beside
from dtlab.wires import ContestEntry, contest, examples


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
        self.cluster = dropdown("cluster", self.clusters, next(iter(self.clusters)), "320px")
        self.algorithm = dropdown("links of", algorithms, algorithms[0])
        self.nbytes = choice("size", [(bytes_text(n), n) for n in sizes], sizes[-1])
        super().__init__([self.cluster, self.algorithm], [self.nbytes])

    def _near(self) -> Iterator[Choice]:
        return ((self.cluster.value, self.algorithm.value, nbytes)
                for nbytes in values_beside(self.nbytes))

    def _draw(self, cluster: str, algorithm: str, nbytes: int) -> Picture:
        return contest_on(self.clusters[cluster], self._entries[cluster, nbytes], algorithm)
