"""What Python and its libraries keep once a process, and each simulated rank has for itself."""

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
IDLE: list[Any] = []  # NumPy's generators of ranks that have ended: to make one takes 60 µs


def library_state() -> tuple[Any, ...]:
    """Random numbers of torch and NumPy, the default dtype, cached parametrizations."""
    return (torch.default_generator.get_state(), mtrand.get_bit_generator(),
            torch.get_default_dtype(), parametrize._cache_enabled, parametrize._cache)


def set_library_state(state: tuple[Any, ...]) -> None:
    """Put back what `library_state` has returned."""
    (random_state, bit_generator, default_dtype,
     parametrize._cache_enabled, parametrize._cache) = state
    torch.default_generator.set_state(random_state)
    mtrand.set_bit_generator(bit_generator)
    if torch.get_default_dtype() != default_dtype:
        torch.set_default_dtype(default_dtype)


def python_state() -> tuple[Any, ...]:
    """Loggers, standard output and error, `print`, filters of warnings, environment variables."""
    return (logging.root, vars(LOGGERS), sys.stdout, sys.stderr, BUILTINS.print,
            warnings.filters, ENVIRON._data)


def set_python_state(state: tuple[Any, ...]) -> None:
    """Put back what `python_state` has returned."""
    (logging.root, LOGGERS.__dict__, sys.stdout, sys.stderr, BUILTINS.print,
     warnings.filters, ENVIRON._data) = state


class Process:
    """The state of one rank: its strands share it, as threads of a process do."""

    __slots__ = ("_caller", "_generator", "_library", "_python")

    def __init__(self) -> None:
        """Called outside of ranks."""
        self._caller = torch.get_default_dtype(), python_state()

    def begin(self, rank: int) -> None:
        """As a process of `run` begins: with the caller's default dtype, standard output, filters
        and environment, and with random numbers and loggers of its own."""
        dtype, (_, _, *same, filters, environ) = self._caller
        root = logging.RootLogger(logging.WARNING)
        vars(root)["root"] = root
        set_python_state((root, vars(logging.Manager(root)), *same, [*filters], {**environ}))
        self._generator = IDLE.pop() if IDLE else MT19937()
        torch.default_generator.manual_seed(rank)
        set_library_state((torch.default_generator.get_state(), self._generator, dtype, 0, {}))
        mtrand.seed(rank)
        self.save()

    def end(self) -> None:
        """The rank has ended: its generator may be another's."""
        IDLE.append(self._generator)

    def save(self, values: bool = True) -> None:
        """Keep the state until `restore`. values: False where only time matters."""
        self._python = python_state()
        if values:
            self._library = library_state()

    def restore(self, values: bool = True) -> None:
        """Put back what `save` has kept."""
        set_python_state(self._python)
        if values:
            set_library_state(self._library)


@contextmanager
def forked() -> Iterator[None]:
    """Ranks begin with gradients on, whatever the caller's mode, and leave all that a process has
    once as it was. As on processes, a rank computes with one thread: so the bits don't depend on
    the number of cores, and what is small doesn't wait for a core that others keep busy.
    """
    caller, autocast = Process(), torch.is_autocast_enabled("cpu")
    caller.save()
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
        torch.set_num_threads(threads)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.autograd.set_detect_anomaly(*anomaly)
        vars(PRINT).update(printing)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
