"""Links that carry nothing any more, though both of their ends still reach the master."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dtlab.ps.messages import Endpoint


class Watch:
    """Counts, for each peer for which this node waits, the checks since its last message. At half
    of `patience` checks it probes the peer; from `patience` on it reports the peer to the master,
    which knows whether the peer is dead."""

    def __init__(self, endpoint: Endpoint, master: int, patience: int):
        self._endpoint, self._master, self._patience = endpoint, master, patience
        self._missed: Counter[int] = Counter()

    def heard(self, src: int) -> None:
        """A message from `src` is here."""
        self._missed.pop(src, None)

    def check(self, awaited: Mapping[int, tuple[int, int]]) -> int | None:
        """Probe and report silent peers; called now and then. awaited: peer → its server, and the
        epoch of the view because of which this node waits for it. Returns a peer that was reported
        long ago without effect, if there is one."""
        for peer in self._missed.keys() - awaited.keys():
            del self._missed[peer]
        for peer, view in sorted(awaited.items()):
            self._missed[peer] += 1
            if self._missed[peer] == max(self._patience // 2, 1):
                self._endpoint.send(peer, ("probe",))
            elif self._missed[peer] >= self._patience:
                self._endpoint.send(self._master, ("unreachable", peer, *view))
        limit = 2 * self._patience
        return next((peer for peer, missed in self._missed.items() if missed > limit), None)
