"""A meter of the memory that a function takes beyond what it was given."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

SLACK_BYTES = 65_536  # Python objects any function makes: frames, views, caches


class Meter(TorchDispatchMode):
    """Measures the peak of live memory allocated while it is entered, on this thread and on those
    that it is `on_this_thread`. One thread at a time runs; the others are `paused`.

    Tensors: every operation reports the storages of its results; those alive at the same time
    and not among `given` are summed up. Everything else (NumPy arrays, lists, bytes) is seen by
    `tracemalloc`, and counts where it exceeds `SLACK_BYTES`.
    """

    def __init__(self, given: Any = ()):
        super().__init__()
        self._known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(given)
                       if isinstance(leaf, torch.Tensor)}
        self._live = WeakIdKeyDictionary()  # storages
        self._tensor_peak = 0
        self._python_peak = 0
        self._python_start = 0
        self._paused: set[int] = set()  # threads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False when torch asks. True, the default, imports all of torch._dynamo at the
        first operation, which takes a second; nothing here is ever compiled."""
        return False

    def __enter__(self) -> Meter:
        tracemalloc.start(1)
        self._python_start = tracemalloc.get_traced_memory()[0]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._note_python()
        tracemalloc.stop()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() not in self._paused:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    storage = leaf.untyped_storage()
                    if storage.data_ptr() not in self._known:
                        self._live[storage] = None
            self._tensor_peak = max(self._tensor_peak, sum(s.nbytes() for s in self._live))
        return result

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once, in bytes."""
        python = self._python_peak - self._python_start
        return self._tensor_peak + (python if python > SLACK_BYTES else 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count what this thread allocates and frees again inside."""
        self._note_python()
        self._paused.add(threading.get_ident())
        try:
            yield
        finally:
            self._paused.discard(threading.get_ident())
            if tracemalloc.is_tracing():
                tracemalloc.reset_peak()

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Measure another thread of the process as well."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)
            self._note_python()

    def _note_python(self) -> None:
        if tracemalloc.is_tracing():
            self._python_peak = max(self._python_peak, tracemalloc.get_traced_memory()[1])
