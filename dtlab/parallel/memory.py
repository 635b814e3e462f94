"""The memory of a rank's tensors: bytes by kind, from one operation to the next, and their peak.

Counted is what torch's own accounting of a GPU would count, on any device: the storages that are
alive. Not seen: what streams (`Comm.begin`) and kernels take for themselves while they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dtlab.checks import short
from dtlab.errors import ConfigError
from dtlab.parallel.synchronized import SynchronizedModule

KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")


def mark(tensor: Tensor, kind: str) -> Tensor:
    """Say what the memory of `tensor` is for, one of `KINDS`; returns `tensor`."""
    tensor.untyped_storage().kind = kind  # type: ignore[attr-defined]  # our own note on it
    return tensor


class MemoryMeter(TorchDispatchMode):
    """Inside `with MemoryMeter(module, optimizer) as meter:`, what the calling rank's tensors
    occupy: those of the module, of the optimizer, and all that are made inside.

    history: (seconds, {kind: bytes}) after each operation that changed it. Kinds: parameters (with
    the module's buffers), gradients, optimizer state, activations (saved for backward), buffers
    (all else: messages under way, gathered parameters, intermediate results).
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        super().__init__()
        if not isinstance(module, nn.Module) \
                or not isinstance(optimizer, torch.optim.Optimizer | None):
            raise ConfigError(f"MemoryMeter takes a module and its optimizer, not {short(module)} "
                              f"and {short(optimizer)}")
        self.module, self.optimizer = module, optimizer
        self.history: list[tuple[float, Mapping[str, int]]] = []
        self._live = WeakIdKeyDictionary()  # storages
        self._hooks = ExitStack()

    @property
    def now(self) -> Mapping[str, int]:
        """Bytes by kind."""
        self._note()
        return self.history[-1][1]

    @property
    def peak(self) -> int:
        """The most bytes of all kinds together."""
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes by kind when they were most in all."""
        return max((kinds for _, kinds in self.history), key=lambda kinds: sum(kinds.values()))

    # ---- how it is measured --------------------------------------------------------------------

    def __enter__(self) -> Self:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self._track(tensor, "parameters")
        for p in self.module.parameters():
            if p.grad is not None:
                self._track(p.grad, "gradients")
            if p.requires_grad:
                self._hooks.enter_context(
                    p.register_post_accumulate_grad_hook(self._gradient_hook))
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:  # of ZeRO: shards
                for p in group["params"]:
                    self._track(p, "optimizer state")
            self._mark_state(self.optimizer)
            self._hooks.enter_context(self.optimizer.register_step_post_hook(self._mark_state))
        if isinstance(self.module, SynchronizedModule):
            for tensor in self.module.held():
                self._track(tensor, "buffers")
        self._hooks.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        super().__enter__()
        self._note()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Sequence[type],
                           args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
                           ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: let it call what it stands for
        made = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return made  # DTensor's, to find out about shapes
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._live[tensor.untyped_storage()] = None
        self._note()
        return made

    def _track(self, tensor: Tensor, kind: str) -> None:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
        storage = tensor.untyped_storage()
        self._live[storage] = None
        if not hasattr(storage, "kind"):
            mark(tensor, kind)

    def _gradient_hook(self, p: Tensor) -> None:
        if p.grad is not None:
            self._track(p.grad, "gradients")

    def _saved(self, tensor: Tensor) -> Tensor:
        self._track(tensor, "activations")
        return tensor.detach()  # an output that its own node kept would keep that node for ever

    def _mark_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for tensor in tree_leaves(list(optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self._track(tensor, "optimizer state")

    def _note(self) -> None:
        """Write down what is alive, if it has changed."""
        kinds = dict.fromkeys(KINDS, 0)
        for storage in self._live:
            kinds[getattr(storage, "kind", "buffers")] += storage.nbytes()
        if not self.history or self.history[-1][1] != kinds:
            self.history.append((time.perf_counter(), kinds))
