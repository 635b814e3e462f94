"""Typed frames: how the referee talks to the processes that run a learner's code.

A frame is a JSON header and raw bytes. Nothing that comes from a learner's process is unpickled,
so the worst that a hostile rank can send is an invalid frame, which is an error like any other.
"""

from __future__ import annotations

import json
import math
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MAX_HEADER_BYTES = 1 << 22
Blob = bytes | bytearray | memoryview
MAX_BYTES = 1 << 27  # of all blobs of a frame
MAX_VALUE_BYTES = 1 << 20  # of one value that is bytes
MOST_KEYS = 10_000  # of a dictionary: right answers have a fifth
_LENGTH = struct.Struct("!Q")


class FrameTimeout(Exception):
    """No frame came, or none was taken, within the time limit."""


class ConnectionClosed(Exception):
    """The other end is closed, or sends what is not a frame."""


class Frame(NamedTuple):
    """One frame: a request, or an answer."""

    kind: str  # what is asked for: "post", "wait", …; "answer"
    stream: int  # which stream of the rank asks, or gets the answer; 0: the rank itself
    fields: dict[str, Any]
    blobs: list[Blob]  # the data of tensors and of pickled objects
    nbytes: int = 0  # of all of it


class FrameSocket:
    """One end of a socket that carries frames."""

    def __init__(self, sock: socket.socket):
        self._sock = sock

    def send(self, kind: str, *blobs: Blob, stream: int = 0, until_s: float = math.inf,
             **fields: Any) -> None:
        """Send one frame. Raises `FrameTimeout` if the peer has not taken it at `until_s`
        (monotonic), `ConnectionClosed`."""
        text = json.dumps([kind, stream, fields, [len(blob) for blob in blobs]]).encode()
        try:
            self._limit(until_s)
            self._sock.sendall(_LENGTH.pack(len(text)) + text)
            for blob in blobs:
                self._sock.sendall(blob)
        except TimeoutError:
            raise FrameTimeout from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from None

    def recv(self, until_s: float = math.inf) -> Frame:
        """The next frame. Raises `FrameTimeout` if it has not come at `until_s`,
        `ConnectionClosed`."""
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until_s))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            kind, stream, fields, lengths = json.loads(self._exactly(length, until_s))
            if not (isinstance(kind, str) and isinstance(stream, int) and isinstance(fields, dict)):
                raise ValueError("not the header of a frame")
            lengths = [int(n) for n in lengths]
            if min(lengths, default=0) < 0 or sum(lengths) > MAX_BYTES:
                raise ValueError(f"{sum(lengths)} bytes in one frame")
            blobs: list[Blob] = [self._exactly(n, until_s) for n in lengths]
            return Frame(kind, stream, fields, blobs, length + sum(lengths))
        except TimeoutError:
            raise FrameTimeout from None
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise ConnectionClosed(f"{type(error).__name__}: {error}") from None

    def wait(self, until_s: float) -> bool:
        """Has something come, or has the peer closed its end, by `until_s`?"""
        timeout_s = max(until_s - time.monotonic(), 0.0)
        return bool(select.select([self._sock], [], [], timeout_s)[0])

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def fileno(self) -> int:
        """The socket's number."""
        return self._sock.fileno()

    def _exactly(self, count: int, until_s: float) -> bytearray:
        """Receive `count` bytes, without a second copy, which would count as the rank's memory."""
        data = bytearray(count)
        remaining = memoryview(data)
        while remaining:
            self._limit(until_s)
            length = self._sock.recv_into(remaining, min(len(remaining), 1 << 20))
            if not length:
                raise ConnectionResetError("the peer closed its end")
            remaining = remaining[length:]
        return data

    def _limit(self, until_s: float) -> None:
        """Make the next socket call give up at `until_s`."""
        self._sock.settimeout(None if until_s == math.inf
                              else max(until_s - time.monotonic(), 1e-4))


def frame_socket_pair() -> tuple[FrameSocket, FrameSocket]:
    """Two connected ends."""
    here, there = socket.socketpair()
    return FrameSocket(here), FrameSocket(there)


# ---- values ------------------------------------------------------------------------------------


def tensor_bytes(x: torch.Tensor) -> Blob:
    """The elements of `x`, in order: a view of its memory if it is contiguous. Any dtype."""
    dense = x.detach().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((x.numel(),), (1,))  # of one element, the stride may be any
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def tensor_from(data: Blob, dtype: str, shape: list[int]) -> torch.Tensor:
    """The tensor of which `tensor_bytes` made `data`. It shares the memory of a bytearray; other
    data is copied. `ValueError` if they don't fit."""
    kind = getattr(torch, dtype, None)
    sizes = [int(n) for n in shape]
    if not isinstance(kind, torch.dtype) or _NO_NUMBERS.match(dtype) or min(
            sizes, default=0) < 0:
        raise ValueError(f"no tensor has dtype {dtype!r} and shape {shape}")
    if math.prod(sizes) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes can't fill a {dtype} tensor of shape {shape}")
    if not data:
        return torch.empty(sizes, dtype=kind, device="cpu")
    writable = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(writable, dtype=kind).reshape(sizes)


_NO_NUMBERS = re.compile(r"q|bits|u?int[1-7]$|float4")  # dtypes with which torch can't compute


def dtype_name(dtype: torch.dtype) -> str:
    """float32, int64, …"""
    return str(dtype).split(".")[-1]


class Opaque(str):
    """A value that is neither number, text, tensor nor a collection of those: its `repr`."""


def encode(value: Any, blobs: list[Blob]) -> Any:
    """Return `value` as JSON; tensors go to `blobs`, other objects become their `repr`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ["int", str(int(value))]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, bytes) and len(value) <= MAX_VALUE_BYTES:
        blobs.append(value)
        return ["bytes", len(blobs) - 1]
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [encode(item, blobs) for item in value]]
    if isinstance(value, dict):
        pairs = [[encode(k, blobs), encode(v, blobs)] for k, v in value.items()]
        return ["dict", pairs]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), blobs)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not (
            value.is_sparse or value.is_quantized or value.is_nested):
        blobs.append(tensor_bytes(value))
        return ["tensor", [dtype_name(value.dtype), list(value.shape), len(blobs) - 1]]
    return ["opaque", repr(value)[:200]]


def decode(tree: Any, blobs: Sequence[Blob]) -> Any:
    """Decode what `encode` made; build plain values only, whatever comes in. Integers beyond the
    modulus of Python's hash become `Opaque`: many could have one hash, which makes dictionaries
    slow."""
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    kind, content = tree
    if kind == "int":
        number = int(content)
        return number if abs(number) < sys.hash_info.modulus else Opaque(content[:40])
    if kind == "float":
        return float.fromhex(content)
    if kind == "bytes" and len(blobs[content]) <= MAX_VALUE_BYTES:
        return bytes(blobs[content])
    if kind == "tuple":
        return tuple(decode(item, blobs) for item in content)
    if kind == "list":
        return [decode(item, blobs) for item in content]
    if kind == "dict":
        if len(content) > MOST_KEYS:
            raise ValueError(f"a dictionary of {len(content)} keys")
        return {decode(k, blobs): decode(v, blobs) for k, v in content}
    if kind == "tensor":
        dtype, shape, which = content
        return tensor_from(blobs[which], dtype, shape)
    return Opaque(content)
