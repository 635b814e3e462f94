"""The contributions that each collective starts from and must end with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.recording.ownership import piece_numbers


class Specification(NamedTuple):
    """wanted (p, pieces, p) and judged (p, pieces) as in `CollectiveFrame`.

    start: what a rank is given: "vector" (every piece, all its own), "piece" (one), "root"
    (only the root has any).
    moves: pieces are only moved, and nothing is added up; see `dtlab.recording.ownership`.
    synchronizes: in the end every rank knows that every rank has arrived (a barrier).
    """

    wanted: np.ndarray
    judged: np.ndarray
    start: str = "vector"
    moves: bool = False
    synchronizes: bool = False

    @staticmethod
    def of(collective: str, p: int, root: int, pieces: int | None = None) -> Specification:
        """The specification of a collective on p ranks. An unknown one is shown, but not judged.

        pieces: into how many the vector is cut (None: p); p where each piece belongs to a rank.
        """
        k, ranks = pieces or p, np.arange(p)
        rank, piece, giver = np.ogrid[:p, :k, :p]
        everywhere = np.ones((p, k, p), bool)
        from_all, from_root, owner = everywhere, everywhere & (giver == root), giver == piece
        all_cells, no_cells = np.ones((p, k), bool), np.zeros((p, k), bool)
        at_root, own_piece = all_cells & (ranks == root)[:, None], np.eye(p, k, dtype=bool)
        known = {
            "all_reduce": Specification(from_all, all_cells),
            "broadcast": Specification(from_root, all_cells, "root"),
            "reduce": Specification(from_all, at_root),
            "scan": Specification(everywhere & (giver <= rank), all_cells),
            # an exclusive scan leaves rank 0 without a result
            "exscan": Specification(everywhere & (giver < rank), all_cells & (ranks > 0)[:, None]),
            "all_gather": Specification(everywhere & owner, all_cells, "piece", moves=True),
            "gather": Specification(everywhere & owner, at_root, "piece", moves=True),
            # piece j is for rank j
            "all_to_all": Specification(from_all, own_piece, moves=True),
            "reduce_scatter": Specification(from_all, own_piece),
            "scatter": Specification(from_root, own_piece, "root", moves=True),
            "barrier": Specification(from_all, all_cells, synchronizes=True),
        }
        return known.get(collective, Specification(from_all, no_cells))

    @property
    def given(self) -> np.ndarray:
        """given[r, j, c]: whether rank c's contribution is in piece j of rank r at the start."""
        p, pieces, _ = self.wanted.shape
        own = np.broadcast_to(np.eye(p, dtype=bool)[:, None, :], (p, pieces, p)).copy()
        if self.start == "piece":
            own &= np.eye(p, pieces, dtype=bool)[:, :, None]
        if self.start == "root":
            own &= np.asarray(self.wanted.any(axis=(0, 1)))[:, None, None]
        return own


def arguments(fn: Callable[..., Any], spec: Specification, rank: int, p: int, root: int
              ) -> dict[str, Any]:
    """Return the arguments of `fn` after the communicator, by the names of its parameters.

    The first parameter after the communicator is the data if none is named x or parts. Data of
    only one piece lies in its place in a vector of all pieces, so that it can be shown there.
    """
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    by_name = [q for q in parameters if q.kind not in (q.VAR_POSITIONAL, q.VAR_KEYWORD)]
    numbers = piece_numbers(p) if spec.moves else 1.0
    parts = torch.from_numpy(spec.given[rank]) * numbers  # piece, contribution
    one_piece = spec.start == "piece" or {"x", "parts"} <= {q.name for q in by_name}
    # Others give no parts, where they have a place to receive.
    only_roots = spec.start == "root" and rank != root and "x" in {q.name for q in by_name}
    data = {"parts": None if only_roots else parts,
            "x": parts[rank] if one_piece else parts.view(-1)}
    given: dict[str, Any] = {}
    for q in by_name:
        if q.name in data:
            given[q.name] = data[q.name]
        elif q.name == "root":
            given[q.name] = root
        elif q.name == "op":
            given[q.name] = "sum"
        elif q.default is q.empty and not any(name in given for name in data):
            given[q.name] = data["x"]
        elif q.default is q.empty:
            raise ConfigError(
                f"can't watch {getattr(fn, '__name__', fn)}: it needs {q.name!r}, and only x, "
                f"parts, root and op can be given; wrap it in a function of (comm, x)")
    return given
