"""The files of a checkpoint: one a rank, and index.json, which names them with their SHA-256.

The files of the next checkpoint have other names, and replacing index.json, in one step, is what
makes them the checkpoint. So a run that dies while saving leaves the checkpoint before, and files
that the next one removes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError

INDEX = "index.json"
PARTIAL = "index.json.partial"  # made before all else, so that a folder without index.json is ours
SHARD = re.compile(r"rank\d+(\.2)?\.pt")


def path_of(folder: str | Path) -> Path:
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise ConfigError(f"a checkpoint's folder is a str or a Path, not {folder!r}")
    return Path(folder)


def check_replaceable(folder: Path) -> None:
    """Raise `ConfigError` if `folder` holds something else than a checkpoint."""
    ours = any((folder / name).exists() for name in (INDEX, PARTIAL))
    if folder.exists() and not ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not a checkpoint; choose another name")


@contextmanager
def on_all_ranks(comm: Comm, call: str, folder: Path | None) -> Iterator[None]:
    """What goes wrong inside on one rank is a `ConfigError` on all."""
    mine = None
    try:
        yield
    except OSError as error:
        mine = f"rank {comm.rank}: {error.filename or folder}: {error.strerror or error}"
    except ConfigError as error:
        mine = str(error)
    for problem in filter(None, comm._all_gather_objects(mine)):
        raise ConfigError(f"{call}: {problem}") from None


def readable(what: str, value: Any) -> Any:
    """A copy of `value`, as `load` will read it."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception:  # of pickle, of torch, or of what a class does when it is pickled
        raise ConfigError(f"{what} can't be saved: a checkpoint holds tensors, numbers, strings, "
                          f"and lists and dicts of them") from None


def prepare(folder: Path) -> str:
    """Make `folder`, and remove what a run that died has left there. Returns the names of the new
    shards, such as "rank{}.pt"."""
    check_replaceable(folder)
    real = Path(os.path.realpath(folder))  # a link may lead where nothing is yet
    real.mkdir(parents=True, exist_ok=True)
    _sync(real.parent)
    try:
        current = read_index(folder)
    except ConfigError:  # there is none, or it is corrupt
        current = {}
    with open(folder / PARTIAL, "w"):
        pass
    _remove_shards(folder, keep=current)
    return "rank{}.2.pt" if "rank0.pt" in current else "rank{}.pt"


def write_shard(path: Path, contents: dict[str, Any]) -> str:
    """Returns its SHA-256."""
    with _on_disk(path, "wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError as error:  # torch's writer hides what ended it
            raise (error.__context__ or error) from None
    return _digest(path)


def publish(folder: Path, digests: dict[str, str]) -> None:
    """From now on, these shards are the checkpoint."""
    with _on_disk(folder / PARTIAL, "w") as file:
        file.write(json.dumps({"files": digests}, indent=1))
    _sync(folder)
    os.replace(folder / PARTIAL, folder / INDEX)
    _sync(folder)
    _remove_shards(folder, keep=digests)


def read_index(folder: Path) -> dict[str, str]:
    """The SHA-256 of each shard, by name."""
    try:
        with open(folder / INDEX) as file:
            return dict(json.load(file)["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} holds no checkpoint: there is no {INDEX}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder / INDEX} is corrupt") from None


def check_shard(path: Path, digest: str) -> None:
    if not path.is_file():
        raise ConfigError(f"the shard {path} is missing")
    if _digest(path) != digest:
        raise ConfigError(f"the shard {path} is corrupt: its SHA-256 is not that in {INDEX}")


def _remove_shards(folder: Path, keep: dict[str, str]) -> None:
    for path in list(folder.iterdir()):
        if SHARD.fullmatch(path.name) and path.name not in keep:
            path.unlink()


@contextmanager
def _on_disk(path: Path, mode: str) -> Iterator[Any]:
    """An open file; afterwards, what was written is on the disk."""
    with open(path, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in `folder` on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
