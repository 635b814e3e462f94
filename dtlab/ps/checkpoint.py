"""Checkpoints of the store: a file a server and clock, with a checksum.

A file is written beside its place, flushed to the disk, then renamed; so it is there as a whole or
not at all, unless the disk tears or rots it, which the checksum tells. What is resumed is the
newest clock of which every server's file is sound.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtlab.checks import check_whole, short
from dtlab.errors import ConfigError

_MAGIC = b"dtlab-ps"
_HEAD = struct.Struct("<8s32sQ")  # magic, SHA-256 of the body, its length


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in a folder: one each time that all workers have passed `every` clocks more; the
    newest `keep` stay. A store that is made anew over the same folder goes on from there."""

    folder: str | Path
    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, Path)) or not str(self.folder):
            raise ConfigError(f"Checkpoints' folder is a path, not {short(self.folder)}")
        check_whole("Checkpoints' every", self.every)
        check_whole("Checkpoints' keep (one may be torn, so keep the one before)", self.keep, 2)
        with self._reached():
            Path(self.folder).exists()

    def path(self, server: int, clock: int) -> Path:
        """The file of `server` at `clock`."""
        return Path(self.folder) / f"server{server}-clock{clock:08d}.ckpt"

    def save(self, server: int, clock: int, state: Any, copy: int = 0) -> Path:
        """Write `state` (what torch.save takes), and drop what is older than the newest `keep`.
        copy: the number of the copy that writes, so that two that write at once do no harm.
        """
        body = io.BytesIO()
        torch.save(state, body)
        data = body.getvalue()
        path = self.path(server, clock)
        beside = path.with_suffix(f".part{copy}")
        with self._reached():
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._reached(), open(beside, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, hashlib.sha256(data).digest(), len(data)) + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        for clock_before in sorted(self.clocks(server))[: -self.keep]:
            self.path(server, clock_before).unlink(missing_ok=True)
        return path

    def load(self, server: int, clock: int) -> Any:
        """Return what was saved; None if the file is missing, torn or corrupt."""
        data = self._body(server, clock)
        return None if data is None else torch.load(io.BytesIO(data), weights_only=False)

    def clocks(self, server: int) -> set[int]:
        """The clocks of which `server` has a file, sound or not."""
        files = Path(self.folder).glob(f"server{server}-clock*.ckpt")
        clocks = (file.stem.rpartition("clock")[2] for file in files)
        return {int(clock) for clock in clocks if clock.isdecimal()}  # else someone's copy

    def newest(self, servers: Iterable[int]) -> int | None:
        """The newest clock of which all `servers` have a sound file; None: there is none."""
        servers = list(servers)
        common = set.intersection(*(self.clocks(server) for server in servers))
        for clock in sorted(common, reverse=True):
            if all(self._body(server, clock) is not None for server in servers):
                return clock
        return None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """A folder that can't be had, or written to, is a `ConfigError`."""
        try:
            yield
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"Checkpoints can't use the folder {short(self.folder)}: {why}") from None

    def _body(self, server: int, clock: int) -> bytes | None:
        path = self.path(server, clock)
        if not path.is_file():
            return None
        with self._reached():
            raw = path.read_bytes()
        if len(raw) < _HEAD.size:
            return None
        magic, digest, length = _HEAD.unpack_from(raw)
        data = raw[_HEAD.size :]
        sound = magic == _MAGIC and len(data) == length
        return data if sound and hashlib.sha256(data).digest() == digest else None
