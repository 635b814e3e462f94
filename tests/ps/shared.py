"""What most trainings have in common: servers serve, workers make the keys, work, and finish."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dtlab import Comm, ps


def on_workers(
    keys: dict[Any, torch.Tensor] | None = None, tables: Iterable[Any] = (), **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn `work(node, *args)` of a worker into a function of every rank; `how`: to join. Without
    `keys` it makes its own."""
    def decorate(work: Callable[..., Any]) -> Callable[..., Any]:
        def body(comm: Comm, *args: Any) -> Any:
            node = ps.join(comm, **how)
            if node.is_server:
                return node.serve()
            if keys is not None:
                node.init(keys, tables=tables)
            found = work(node, *args)
            node.finish()
            return found

        return body

    return decorate
