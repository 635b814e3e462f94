"""Finding what a class has handed in: notebooks in a folder, in folders of it, and in zips."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dtlab.errors import ConfigError

LARGEST_BYTES = 20_000_000  # of a notebook: with its pictures, one of ours has a tenth
LARGEST_ZIP_FILES = 1_000
_IGNORED = {".ipynb_checkpoints", "__MACOSX", ".git"}

# How learning platforms name what they let a teacher download.
_MOODLE = re.compile(r"^(?P<learner>.+?)_\d+_assignsubmission_file")
_CANVAS = re.compile(r"^(?P<learner>[^_]+)(_LATE)?_\d+_\d+_")


@dataclass(frozen=True)
class HandIn:
    """One notebook that a learner has handed in. If `problem` is set, it can't be read."""

    learner: str
    name: str  # where it was found, below the class's folder
    file: Path  # where it is now
    handed_in: datetime
    problem: str = ""

    @property
    def digest(self) -> str:
        """The checksum of its content."""
        return hashlib.sha256(self.problem.encode() or self.file.read_bytes()).hexdigest()


def find_hand_ins(folder: Path, unpacked: Path) -> list[HandIn]:
    """Everything that was handed in below `folder`, in the order of names; zips are unpacked into
    `unpacked`. What can't be read is in the list too, and says why.

    The learner is the first folder's name, or the zip's; of a file that lies in `folder` itself,
    what stands before the course's name of the notebook: ada_05_all_reduce.ipynb is Ada's.
    """
    found: list[HandIn] = []
    for path in _files(folder):
        name = path.relative_to(folder)
        learner = learner_of(name)
        try:
            when = datetime.fromtimestamp(path.lstat().st_mtime)
        except OSError as error:
            gone = f"it can't be read: {error}"
            found.append(HandIn(learner, str(name), path, datetime.min, gone))
            continue
        if path.suffix == ".zip":
            found += _unpack(path, learner, str(name), when, unpacked)
        else:
            found.append(HandIn(learner, str(name), path, when, _problem_of(path)))
    if not found:
        raise ConfigError(f"{folder}: there is no notebook and no zip in this folder")
    return found


def _files(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):  # follows no links
        folders[:] = sorted(set(folders) - _IGNORED)
        for file in sorted(files):
            if file.endswith((".ipynb", ".zip")):
                yield Path(where) / file


def learner_of(name: Path) -> str:
    """Whose the file of this name is: see `find_hand_ins`."""
    first = name.parts[0]
    for platform in (_MOODLE, _CANVAS):
        if match := platform.match(first):
            return match["learner"]
    if len(name.parts) > 1:
        return first
    return re.sub(r"[ _-]+\d\d_\w+$", "", name.stem)


def _problem_of(path: Path) -> str:
    """Why this is no file to open; "" if it is one. A pipe or a device could never end."""
    told = path.lstat()
    if stat.S_ISLNK(told.st_mode):
        return "it is a link; hand in the file itself"
    if not stat.S_ISREG(told.st_mode):
        return "it is no ordinary file"
    if told.st_size > LARGEST_BYTES:
        return f"it has {told.st_size:,} bytes, and a notebook at most {LARGEST_BYTES:,}"
    return ""


def _unpack(path: Path, learner: str, name: str, when: datetime, into: Path) -> list[HandIn]:
    """The notebooks in a zip, under names of ours, whatever the zip calls them."""
    problem = "" if stat.S_ISREG(path.lstat().st_mode) else "it is no ordinary file"
    found: list[HandIn] = []
    try:
        with zipfile.ZipFile(path if not problem else os.devnull) as archive:
            for member in archive.infolist()[:LARGEST_ZIP_FILES]:
                parts = Path(member.filename).parts
                if member.filename.endswith(".ipynb") and not _IGNORED & set(parts):
                    inner = f"{name}/{member.filename}"
                    found.append(_unpack_one(archive, member, learner, inner, when, into))
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return [HandIn(learner, name, path, when, problem or f"it is no zip: {error}")]
    return found or [HandIn(learner, name, path, when, "there is no notebook in it")]


def _unpack_one(archive: zipfile.ZipFile, member: zipfile.ZipInfo, learner: str, name: str,
                when: datetime, into: Path) -> HandIn:
    try:
        with archive.open(member) as source:
            data = source.read(LARGEST_BYTES + 1)  # whatever size the zip says
    except (OSError, RuntimeError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        return HandIn(learner, name, into, when, f"it can't be unpacked: {error}")
    if len(data) > LARGEST_BYTES:
        return HandIn(learner, name, into, when, f"it has more than {LARGEST_BYTES:,} bytes")
    file = into / f"{hashlib.sha256(name.encode() + data).hexdigest()[:16]}.ipynb"
    into.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return HandIn(learner, name, file, when)
