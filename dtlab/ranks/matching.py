"""Do a send and the receive that meets it fit together? Every communicator asks here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from dtlab.errors import ConfigError, ShapeMismatch


class Header(NamedTuple):
    """The description of a message by one of its sides."""

    kind: str  # "tensor" | "object"
    dtype: str = ""  # "float32"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    label: str = ""  # the collective it is part of, "" if none

    def __str__(self) -> str:
        if self.kind == "object":
            return "an object"
        return f"{self.dtype} {self.shape}"


def describe(x: Any, label: str = "") -> Header:
    """The header of a message that carries, or is received into, `x`."""
    if isinstance(x, torch.Tensor):
        return Header("tensor", str(x.dtype).split(".")[-1], tuple(x.shape), x.nbytes, label)
    return Header("object", label=label)


def check_sources(rank: int, named: bool, anyone: Iterable[Header]) -> None:
    """Raise `ConfigError` if receives from anyone, which `anyone` describes, would be under way
    together and differ, or beside one that names its sender (`named`)."""
    kinds = sorted({f"{header}{' in ' * bool(header.label)}{header.label}" for header in anyone})
    if kinds and (named or len(kinds) > 1):
        other = "one that names its sender" if named else f"one of {kinds[-1]}"
        raise ConfigError(
            f"rank {rank}: a receive of {kinds[0]} from anyone is under way beside {other}, so "
            f"which message each meets depends on who comes first; wait for one before you post "
            f"the other, or let one have its own communicator: comm.subgroup(range(comm.size))"
        )


def check_match(sent: Header, src: int, wanted: Header, dst: int) -> None:
    """Raise `ShapeMismatch` unless what `src` sent is what `dst` has made room for."""
    if sent.label != wanted.label:
        raise ShapeMismatch(
            f"rank {src} is in {sent.label or 'a plain send'}, "
            f"but rank {dst} is in {wanted.label or 'a plain recv'}; "
            f"all ranks must make the same calls, in the same order, with equal arguments"
        )
    if sent.kind != wanted.kind:
        verb = "recv_object" if sent.kind == "object" else "recv into a tensor"
        raise ShapeMismatch(
            f"rank {src} sent {sent}, but rank {dst} waits to receive {wanted}; use {verb}"
        )
    if sent.kind == "tensor" and (sent.dtype, sent.shape) != (wanted.dtype, wanted.shape):
        raise ShapeMismatch(
            f"rank {src} sent {sent}, but rank {dst} waits to receive {wanted}; "
            f"make shape and dtype equal on both sides"
        )
