"""The files of checkpoints: a numbered folder each, and `latest`, which says which one counts.

A numbered folder holds a file of each rank, and index.json, which names them with their SHA-256.
The file `latest` is replaced, in one step, when all that is on the disk; older checkpoints are
removed after that. So a run that dies while saving leaves the checkpoint before, and a folder that
the next save removes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError

INDEX, LATEST = "index.json", "latest"
FIRST = "first.partial"  # made before all else, so that a folder without `latest` is ours


def path_of(folder: str | Path) -> Path:
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise ConfigError(f"a checkpoint's folder is a str or a Path, not {folder!r}")
    return Path(folder)


def check_replaceable(folder: Path) -> None:
    """Raise `ConfigError` if `folder` holds something else than a checkpoint."""
    ours = any((folder / name).exists() for name in (LATEST, FIRST))
    if folder.exists() and not ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not a checkpoint; choose another name")


@contextmanager
def on_all_ranks(comm: Comm, call: str, folder: Path | None) -> Iterator[None]:
    """Turn an error of one rank inside into a `ConfigError` on all."""
    mine = None
    try:
        yield
    except FileNotFoundError as error:  # only another run takes away what this one is writing
        mine = f"{error.filename} is missing" if call != "save" else (
            f"{folder}: another run saves checkpoints here at the same time; give each run a "
            f"folder of its own")
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
        entries = (value.items() if isinstance(value, dict) else
                   enumerate(value) if isinstance(value, (list, tuple)) else ())
        for key, entry in entries:
            readable(f"{what}[{key!r}]", entry)  # the one at fault is named
        raise ConfigError(f"{what} can't be saved: a checkpoint holds tensors, Python's numbers, "
                          f"strings, and lists and dicts of them, no "
                          f"{type(value).__module__}.{type(value).__qualname__}") from None


def prepare(folder: Path, known: int | None) -> Path:
    """Make `folder` and, in it, the folder of the next checkpoint. known: the number of the one
    that counted when this run saved or loaded last, if it did."""
    check_replaceable(folder)
    real = Path(os.path.realpath(folder))  # a link may lead where nothing is yet
    try:
        real.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as in /proc
        raise ConfigError(f"{folder} can't be made: {error.strerror}") from None
    _sync(real.parent)
    latest = latest_number(folder)
    if known is not None and latest not in (known, None):  # None: it was removed
        raise ConfigError(f"{folder}: another run has saved a checkpoint here since this one saved "
                          f"or loaded number {known}; give each run a folder of its own")
    if latest is None:
        with open(folder / FIRST, "w"):
            pass
    there = numbers(folder)
    for path in (folder / str(number) for number in there if number != latest):
        if not _is_complete(path):
            shutil.rmtree(path)  # first of all: what a save on a full disk has left fills it
    target = folder / str(max([latest or 0, *there]) + 1)
    target.mkdir()
    return target


def write_shard(path: Path, contents: dict[str, Any]) -> str:
    """Write `contents` to `path`; returns the file's SHA-256."""
    with _on_disk(path, "wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError as error:  # torch's writer hides what ended it
            raise (error.__context__ or error) from None
    return _digest(path)


def publish(target: Path, digests: dict[str, str], latest: int | None, keep: int) -> None:
    """From now on, `target` is the checkpoint; latest: the one that was it before. Of those that
    ever were, the newest `keep` stay."""
    folder = target.parent
    with _on_disk(target / INDEX, "w") as file:
        file.write(json.dumps({"files": digests}, indent=1))
    with _on_disk(target / LATEST, "w") as file:  # there, for another run may write its own
        file.write(target.name)
    _sync(target)
    _sync(folder)
    if latest_number(folder) != latest:
        shutil.rmtree(target)
        raise FileNotFoundError
    os.replace(target / LATEST, folder / LATEST)
    _sync(folder)
    if (folder / FIRST).exists():
        (folder / FIRST).unlink()
    older = [folder / str(n) for n in numbers(folder) if n <= int(target.name)]
    for path in [path for path in older if _is_complete(path)][:-keep]:
        (path / INDEX).unlink()  # so that half of it is no checkpoint
        shutil.rmtree(path)


def _is_complete(path: Path) -> bool:
    return (path / INDEX).exists() and not (path / LATEST).exists()


def numbers(folder: Path) -> list[int]:
    """Return the numbers of all checkpoints in `folder`, complete or not, the oldest first."""
    return sorted(int(path.name) for path in folder.iterdir()
                  if path.name.isascii() and path.name.isdecimal())


def latest_number(folder: Path) -> int | None:
    """The number of the checkpoint that counts; None: there is none."""
    try:
        return int((folder / LATEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise ConfigError(f"{folder / LATEST} is corrupt; write the number of a checkpoint into "
                          f"it: one of {', '.join(map(str, numbers(folder)))}") from None


def candidates(folder: Path) -> list[Path]:
    """The checkpoints that `load` tries, the one that counts first."""
    latest = latest_number(folder)
    if latest is None:
        raise ConfigError(f"{folder} holds no checkpoint: there is no {LATEST}")
    there = sorted({latest, *numbers(folder)}, reverse=True)
    return [folder / str(number) for number in there if number <= latest]


def first_whole(comm: Comm, folder: Path) -> tuple[Path, dict[str, str], int]:
    """The newest checkpoint whose files are as they were written, its index, and the number of the
    one that counts. Each rank looks at some of them. Warns of those that it passes over; raises
    `ConfigError` if there is no other."""
    with on_all_ranks(comm, "load", folder):
        tried = candidates(folder)
    problems: list[ConfigError] = []
    tried = comm._all_gather_objects(tried)[0]
    for path in tried:
        try:
            with on_all_ranks(comm, "load", folder):
                index = read_index(path)
                for name in list(index)[comm.rank :: comm.size]:
                    check_shard(path / name, index[name])
        except ConfigError as problem:
            problems.append(problem)
            continue
        for why in problems if comm.rank == 0 else ():
            warnings.warn(f"{why}; loading {path} instead", stacklevel=3)
        return path, index, int(tried[0].name)
    raise problems[0]


def read_index(path: Path) -> dict[str, str]:
    """The SHA-256 of each shard, by name."""
    try:
        shards = dict(json.loads((path / INDEX).read_text())["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"the checkpoint {path} is incomplete: there is no {INDEX}") from None
    except (ValueError, KeyError, TypeError):
        shards = {}
    if not shards:
        raise ConfigError(f"{path / INDEX} is corrupt")
    return shards


def check_shard(path: Path, digest: str) -> None:
    if not path.is_file():
        raise ConfigError(f"the shard {path} is missing")
    if _digest(path) != digest:
        raise ConfigError(f"the shard {path} is corrupt: its SHA-256 is not that in {INDEX}")


@contextmanager
def _on_disk(path: Path, mode: str) -> Iterator[Any]:
    """Open a file; afterwards, what was written is on the disk."""
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
