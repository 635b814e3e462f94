"""Links that carry nothing any more, though both of their ends still reach the master."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dtlab.ps.messages import Endpoint


class Watch:
    """The peers for which this node waits, and how often it has looked in vain for a message of
    each. Half-way to `patience` looks it asks such a peer for a sign of life; from then on a peer
    that says nothing is reported to the master, which knows whether the peer is dead."""

    def __init__(self, endpoint: Endpoint, master: int, patience: int):
        self._endpoint, self._master, self._patience = endpoint, master, patience
        self._vain: Counter[int] = Counter()

    def heard(self, src: int) -> None:
        """A message from `src` is here."""
        self._vain.pop(src, None)

    def look(self, awaited: Mapping[int, tuple[int, int]]) -> int | None:
        """Probe and report silent peers; called now and then. awaited: peer → its server, and the
        epoch of the view because of which this node waits for it. Returns a peer that was reported
        long ago, without an effect: the master has not heard of it, or is silent, too."""
        for peer in self._vain.keys() - awaited.keys():
            del self._vain[peer]
        for peer, view in sorted(awaited.items()):
            self._vain[peer] += 1
            if self._vain[peer] == max(self._patience // 2, 1):
                self._endpoint.send(peer, ("probe",))
            elif self._vain[peer] >= self._patience:
                self._endpoint.send(self._master, ("unreachable", peer, *view))
        return next((peer for peer, vain in self._vain.items() if vain > 2 * self._patience), None)
