"""The state that Python keeps once a process, and each simulated rank has for itself."""

from __future__ import annotations

import builtins
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.random import MT19937, mtrand
from torch.nn.utils import parametrize

LOGGERS = logging.Logger.manager
ENVIRON: Any = os.environ
BUILTINS: Any = builtins
PRINT = torch._tensor_str.PRINT_OPTS
UNUSED_GENERATORS: list[Any] = []  # of NumPy, for reuse: making one takes 200 µs


class ProcessState:
    """A copy of the state that a process has once; one for the caller, one for each rank.

    A strand saves it when it pauses and restores it when it goes on; hence few function calls.
    """

    __slots__ = ("_generator", "_library", "_python")
    _python: tuple[Any, ...]
    _library: tuple[Any, ...]  # what values depend on

    def __init__(self) -> None:
        self.save()

    def begin(self, rank: int) -> None:
        """Begin as a process of `run` does: with the caller's default dtype, standard output,
        filters and environment, and with random numbers and loggers of its own."""
        _, _, *same, filters, environ = self._python
        root = logging.RootLogger(logging.WARNING)
        vars(root)["root"] = root
        self._python = root, vars(logging.Manager(root)), *same, [*filters], {**environ}
        self._generator = UNUSED_GENERATORS.pop() if UNUSED_GENERATORS else MT19937()
        torch.default_generator.manual_seed(rank)
        self._library = (torch.default_generator.get_state(), self._generator, self._library[2], 0,
                         {})
        self.restore()
        mtrand.seed(rank)

    def end(self) -> None:
        """The rank has ended: another rank may use its generator."""
        UNUSED_GENERATORS.append(self._generator)

    def save(self, values: bool = True) -> None:
        """Copy the state of the process. values: False where only time matters."""
        self._python = (
            logging.root, LOGGERS.__dict__, sys.stdout, sys.stderr, BUILTINS.print,
            warnings.filters, ENVIRON._data)
        if values:
            self._library = (
                torch.default_generator.get_state(), mtrand.get_bit_generator(),
                torch.get_default_dtype(), parametrize._cache_enabled, parametrize._cache)

    def restore(self, values: bool = True) -> None:
        """Write the saved state back into the process."""
        (logging.root, LOGGERS.__dict__, sys.stdout, sys.stderr, BUILTINS.print,
         warnings.filters, ENVIRON._data) = self._python
        if values:
            (random_state, bit_generator, default_dtype,
             parametrize._cache_enabled, parametrize._cache) = self._library
            torch.default_generator.set_state(random_state)
            mtrand.set_bit_generator(bit_generator)
            if torch.get_default_dtype() != default_dtype:
                torch.set_default_dtype(default_dtype)


@contextmanager
def forked() -> Iterator[None]:
    """Inside, ranks run with gradients on and one thread, as in processes; so the bits of results
    don't depend on the number of cores. Afterwards the caller's state is as it was."""
    caller, autocast = ProcessState(), torch.is_autocast_enabled("cpu")
    numbers = mtrand.get_state(legacy=False)  # with the second one of two that `randn` makes
    device, threads, printing = torch.get_default_device(), torch.get_num_threads(), {**vars(PRINT)}
    deterministic, precision = (torch.get_deterministic_debug_mode(),
                                torch.get_float32_matmul_precision())
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False):  # this puts back the gradient mode, too
            yield
    finally:
        caller.restore()
        mtrand.set_state(numbers)
        torch.set_num_threads(threads)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.autograd.set_detect_anomaly(*anomaly)
        vars(PRINT).update(printing)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
