"""The costs of a machine: the figures by which `algorithm="auto"` chooses.

`dtlab.calibrate()` measures them and keeps them in the user's cache, one file a host; every run
reads them there. What was never measured has the `TYPICAL` figures of a laptop's loopback.
"""

from __future__ import annotations

import json
import math
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import platformdirs

from dtlab.checks import check_amount, check_number
from dtlab.errors import ConfigError


class Machine(NamedTuple):
    """A message of n bytes takes alpha + n·beta seconds, reducing n bytes n·gamma."""

    alpha: float  # seconds per message
    beta: float  # seconds per byte
    gamma: float  # seconds per byte reduced
    lanes: float = math.inf  # how many messages can move at once: on one host, one a core
    date: str = ""  # when it was measured, ISO 8601; "" if never
    host: str = ""
    # Seconds that a rank is busy with each message after the first, where it posts several at once
    # and waits for none between them; never more than alpha. LogP calls it o.
    overhead: float = math.inf


def check_machine(machine: object) -> None:
    """Raise `ConfigError` unless it is a `Machine` of which all figures make sense."""
    if not isinstance(machine, Machine):
        raise ConfigError(f"machine must be a dtlab.machine.Machine, not {machine!r:.60}")
    for name in ("alpha", "beta", "gamma"):
        check_amount(f"{name} of a machine", getattr(machine, name), " seconds")
    for name in ("lanes", "overhead"):  # may be infinite
        check_number(f"{name} of a machine", getattr(machine, name))
    if machine.lanes <= 0 or machine.overhead < 0:
        raise ConfigError(f"lanes of a machine must be more than 0, and overhead 0 or more, not "
                          f"{machine.lanes!r} and {machine.overhead!r}")


# Measured on two cores of a server.
TYPICAL = Machine(alpha=6e-5, beta=2.5e-10, gamma=5e-11, lanes=2, overhead=2e-5)


def cache_file() -> Path:
    """Return where this host's figures are kept: in the folder that DTLAB_CACHE names, else in each
    system's own place for caches, which `platformdirs` knows."""
    folder = Path(os.environ.get("DTLAB_CACHE") or platformdirs.user_cache_path("dtlab"))
    return folder / f"machine-{platform.node() or 'host'}.json"


def save(machine: Machine) -> Path:
    """Keep `machine` for later runs on this host. Returns the file."""
    path = cache_file()
    draft = path.with_suffix(".new")  # a rank that reads meanwhile finds the old file, whole
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(machine._asdict(), indent=1))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"this host's figures can't be kept: {error}; set DTLAB_CACHE to a "
                          f"folder in which you may write") from None
    load.cache_clear()
    return path


@lru_cache(maxsize=1)
def load() -> Machine:
    """This host's figures; `TYPICAL` if they were never measured, or the file is no good."""
    try:
        machine = Machine(**json.loads(cache_file().read_text()))
        check_machine(machine)
    except (OSError, ValueError, TypeError):
        return TYPICAL
    return machine
