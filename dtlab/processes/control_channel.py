"""Frames over a local socket: one pickled object, and open files beside it."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from dtlab.errors import ConfigError

_HEAD = struct.Struct("<IB")  # length of the body, number of file descriptors
_CHUNK = 1 << 16
_MOST_FILES = 253  # beside one frame: as many as Linux takes


class ChannelClosed(EOFError):
    """The other end is gone."""


class ControlChannel:
    """One end of a socket pair between the launcher and a rank. Frames are small: what is large
    travels as an open memory file (`dtlab.ranks.serialization`)."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `selectors`."""
        return self.sock.fileno()

    def send(self, frame: Any, fds: Sequence[int] = ()) -> None:
        """Send one object, and duplicates of these file descriptors. Raises `OSError` if gone."""
        body = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        data = _HEAD.pack(len(body), len(fds)) + body
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
        self.sock.sendall(data[sent:])

    def recv(self) -> tuple[Any, list[int]]:
        """Wait for one frame. Raises `ChannelClosed` once the other end is gone."""
        while (frame := self._next()) is None:
            self._read()
        return frame

    def ready_frames(self) -> list[tuple[Any, list[int]]]:
        """All frames complete after one read, which must not block. Raises `ChannelClosed`."""
        self._read()
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        """Close the socket, and the files that came and were not taken."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _CHUNK, _MOST_FILES)
        except ConnectionError:
            data, fds = b"", []
        self._fds.extend(fds)
        if not data:
            raise ChannelClosed
        self._bytes += data

    def _next(self) -> tuple[Any, list[int]] | None:
        if len(self._bytes) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._bytes)
        end = _HEAD.size + length
        if len(self._bytes) < end:
            return None
        if count > len(self._fds):  # the system has dropped some
            raise ConfigError("this takes more open files than you may have (ulimit -n); allow "
                              "more, or take fewer ranks")
        frame = pickle.loads(self._bytes[_HEAD.size : end])
        del self._bytes[:end]
        return frame, [self._fds.popleft() for _ in range(count)]

