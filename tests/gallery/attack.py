"""What an attack is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "dtlab-attack"  # in the names of all that an attack may leave behind


@dataclass(frozen=True)
class Attack:
    """A notebook that is handed in: the course's, with `code` in place of one answer, or changed by
    `edit`. It must earn nothing for `exercise`; where a part of it is honest, at most what that
    earns.
    """

    name: str
    code: str = ""
    exercise: str = "hello-ranks"
    edit: Callable[[dict[str, Any]], None] | None = None
    most: float = 0  # points that its honest part earns


RIGHT = ("return comm.rank, comm.size, (comm.rank - 1) % comm.size, "
         "(comm.rank + 1) % comm.size")  # for an attack that works: its point shows


def hello(name: str, *lines: str, before: str = "") -> Attack:
    """An attack by the answer to hello-ranks, whose lines end in something wrong."""
    body = "\n".join(f"    {line}" for line in lines)
    return Attack(name, f"{before}\ndef hello(comm):\n{body}\n    return None\n")
