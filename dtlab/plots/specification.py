"""What each collective starts from and must end with, in contributions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.plots.ownership import piece_numbers


class Spec(NamedTuple):
    """wanted (p, pieces, p) and judged (p, pieces) as in `Frame`; `start`: what a rank is given.

    start: "vector" (every piece, all its own), "piece" (one), "root" (only the root has any).
    moves: pieces are only moved, and nothing is added up; see `dtlab.plots.ownership`.
    synchronizes: in the end every rank knows that every rank has arrived (a barrier).
    """

    wanted: np.ndarray
    judged: np.ndarray
    start: str = "vector"
    moves: bool = False
    synchronizes: bool = False


def spec_of(collective: str, p: int, root: int, pieces: int | None = None) -> Spec:
    """The specification of a collective on p ranks. An unknown one is shown, but not judged.

    pieces: into how many the vector is cut (None: p); p where each piece belongs to a rank.
    """
    k = pieces or p
    everyone = np.ones((p, k, p), bool)
    all_cells, no_cells = np.ones((p, k), bool), np.zeros((p, k), bool)
    at_root = no_cells.copy()
    at_root[root] = True
    own_piece = np.eye(p, k, dtype=bool)
    of_root = np.zeros((p, k, p), bool)
    of_root[..., root] = True
    piece_of_its_rank = np.broadcast_to(np.eye(k, p, dtype=bool), (p, k, p)).copy()
    up_to_me = np.broadcast_to(np.tri(p, dtype=bool)[:, None, :], (p, k, p)).copy()
    before_me = np.broadcast_to(np.tri(p, k=-1, dtype=bool)[:, None, :], (p, k, p)).copy()
    not_first = all_cells.copy()
    not_first[0] = False  # an exclusive scan leaves rank 0 without a result
    known = {
        "all_reduce": Spec(everyone, all_cells),
        "broadcast": Spec(of_root, all_cells, "root"),
        "reduce": Spec(everyone, at_root),
        "scan": Spec(up_to_me, all_cells),
        "exscan": Spec(before_me, not_first),
        "all_gather": Spec(piece_of_its_rank, all_cells, "piece", moves=True),
        "gather": Spec(piece_of_its_rank, at_root, "piece", moves=True),
        "all_to_all": Spec(everyone, own_piece, moves=True),  # piece j: what is meant for rank j
        "reduce_scatter": Spec(everyone, own_piece),
        "scatter": Spec(of_root, own_piece, "root", moves=True),
        "barrier": Spec(everyone, all_cells, synchronizes=True),
    }
    return known.get(collective, Spec(everyone, no_cells))


def arguments(
    fn: Callable[..., Any], spec: Spec, rank: int, p: int, root: int
) -> dict[str, Any]:
    """What `fn` is called with, after the communicator: by the names of its parameters.

    The first parameter after the communicator is the data if none is named x or parts. Whatever is
    only one piece lies in its place in a vector of all pieces, so that it can be shown there.
    """
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    by_name = [q for q in parameters if q.kind not in (q.VAR_POSITIONAL, q.VAR_KEYWORD)]
    pieces = spec.wanted.shape[1]
    vector = torch.zeros(pieces * p)
    parts = vector.view(pieces, p)  # piece, contribution
    given_pieces = slice(rank, rank + 1) if spec.start == "piece" else slice(None)
    if spec.start != "root" or rank == root:
        if spec.moves:
            parts[given_pieces] = piece_numbers(p)[given_pieces, rank, None]
        else:
            parts[given_pieces, rank] = 1.0
    one_piece = spec.start == "piece" or {"x", "parts"} <= {q.name for q in by_name}
    data = {"parts": parts, "x": parts[rank] if one_piece else vector}
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
                f"parts, root and op can be given; wrap it in a function of (comm, x)"
            )
    return given
