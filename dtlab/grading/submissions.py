"""Finding what a class has handed in: notebooks in a folder, in folders of it, and in zips."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dtlab.errors import ConfigError
from dtlab.grading.report import printable

LARGEST_BYTES = 20_000_000  # of a notebook; one of the course has a tenth, with its pictures
LARGEST_ZIP_BYTES = 5 * LARGEST_BYTES  # of all notebooks in a zip
LARGEST_ZIP_FILES = 100  # notebooks
NO_NOTEBOOK, EMPTY = "its name ends neither in .ipynb nor in .zip", "this folder is empty"
_IGNORED = re.compile(r"__MACOSX$|\.[^.]")  # names of folders that hold no hand-ins

# How learning platforms name the files that a teacher downloads. number: the learner's.
_PLATFORMS = (re.compile(r"^(?P<learner>.+?)_(?P<number>\d+)_assignsubmission_file"),  # Moodle
              re.compile(r"^(?P<learner>[^_]+)(_LATE)?_(?P<number>\d+)_\d+_"))  # Canvas


class Learner(NamedTuple):
    """A person who handed something in. Two of one name differ in their key."""

    name: str
    key: str  # the platform's number, or the name as the file system has it


@dataclass(frozen=True)
class HandIn:
    """One notebook that a learner has handed in. If `problem` is set, it can't be read."""

    learner: str
    name: str  # where it was found, below the class's folder
    file: Path  # where it is now
    handed_in: datetime
    problem: str = ""
    saved: datetime = datetime.min  # the file's date in a zip, to find the later of two copies

    @property
    def when(self) -> str:
        """The time when it was handed in, for people, by this machine's clock."""
        if self.handed_in == datetime.min:
            return "at a time that is not known"
        return f"{self.handed_in.astimezone():%Y-%m-%d %H:%M %Z}"

    @property
    def digest(self) -> str:
        """The checksum of its content."""
        return hashlib.sha256(self.problem.encode() or self.file.read_bytes()).hexdigest()


def find_hand_ins(folder: Path, unpacked: Path) -> list[HandIn]:
    """Find all hand-ins below `folder`, in the order of names; zips are unpacked into `unpacked`.
    A file that can't be read has an entry with its `problem`; so has a learner without a notebook
    or a zip.

    The learner is the first folder's name, or the zip's; for a file that lies in `folder` itself,
    the part before the course's name of the notebook: ada_05_all_reduce.ipynb is Ada's. If two
    learners have one name, the platform's number is added, or a number of ours.
    """
    found: dict[Learner, list[HandIn]] = {}
    for path, problem in _entries(folder):
        owner = learner_of(path.relative_to(folder))
        theirs = found.setdefault(owner, [])
        name = _one_line(str(path.relative_to(folder)))
        try:
            when = datetime.fromtimestamp(path.lstat().st_mtime)
            problem = problem or _problem_of(path)
        except (OSError, ValueError, OverflowError) as error:  # gone; or a time of no date
            when, problem = datetime.min, f"it can't be read: {error}"
        if path.name.lower().endswith(".zip") and not problem:
            theirs += _unpack(path, name, when, unpacked)
        else:
            theirs.append(HandIn("", name, path, when, printable(problem)))
    names = _unique_names(found)
    hand_ins = [replace(each, learner=names[owner]) for owner, theirs in found.items()
                for each in _without_other_files(theirs)]
    if all(each.problem in (NO_NOTEBOOK, EMPTY) for each in hand_ins):
        raise ConfigError(f"{folder}: there is no notebook and no zip in this folder")
    return sorted(hand_ins, key=lambda each: each.name)


def find_each(paths: Iterable[Path], unpacked: Path) -> list[HandIn]:
    """Return the notebooks at these paths, and in these folders and zips. Learners have no names.
    """
    found: list[HandIn] = []
    for path in paths:
        given = HandIn("", str(path), path, datetime.min)
        if path.is_dir():
            try:
                found += [replace(each, name=f"{path}/{each.name}")
                          for each in find_hand_ins(path, unpacked)]
            except ConfigError as error:
                found.append(replace(given, problem=str(error).removeprefix(f"{path}: ")))
        elif path.name.lower().endswith(".zip") and path.is_file():
            found += _unpack(path, str(path), datetime.min, unpacked)
        else:
            found.append(given)
    return found


def _entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, "") of every file below `folder`, and (path, problem) of each folder that is
    empty, a link, or can't be read. Hidden files don't count."""
    unread: list[OSError] = []
    for where, folders, files in os.walk(folder, onerror=unread.append):  # follows no links
        for name in folders:
            if (Path(where) / name).is_symlink():
                yield Path(where) / name, "it is a link; hand in the folder itself"
        folders[:] = sorted(name for name in folders if not _IGNORED.match(name))
        seen = [file for file in sorted(files) if not file.startswith("._")
                and (_is_wanted(Path(file)) or not file.startswith("."))]
        if not folders and not seen and Path(where) != folder:
            yield Path(where), EMPTY
        for file in seen:
            yield Path(where) / file, ""
    for error in unread:
        yield Path(os.fsdecode(error.filename)), f"it can't be read: {error.strerror}"


def learner_of(name: Path) -> Learner:
    """Return the learner whose file has this name: see `find_hand_ins`."""
    first = unicodedata.normalize("NFC", name.parts[0])
    for platform in _PLATFORMS:
        if match := platform.match(first):
            return Learner(plain_name(match["learner"]), match["number"])
    if len(name.parts) == 1:
        first = re.sub(r"[ _-]+\d\d[a-z]?_.*$", "", Path(first).stem)
    return Learner(plain_name(first), first)


def _one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def is_late(name: str) -> bool:
    """Does the name have Canvas's mark of a late hand-in?"""
    return bool((match := _PLATFORMS[1].match(name)) and match[2])


def plain_name(name: str) -> str:
    """Normalize a name: é has two encodings in Unicode, of which a Mac writes the other."""
    return " ".join(printable(unicodedata.normalize("NFC", name)).split())


def _unique_names(owners: Iterable[Learner]) -> dict[Learner, str]:
    """Give each learner a name that no other has."""
    namesakes: defaultdict[str, list[Learner]] = defaultdict(list)
    for owner in owners:
        namesakes[owner.name].append(owner)
    names = {}
    for name, same in namesakes.items():
        for number, owner in enumerate(same, 1):
            mark = owner.key if owner.key.isdigit() else number
            names[owner] = name if len(same) == 1 else f"{name} ({mark})"
    return names


def _without_other_files(theirs: list[HandIn]) -> list[HandIn]:
    """Drop other files beside notebooks; of a learner with other files only, keep one."""
    return [each for each in theirs if each.problem not in (NO_NOTEBOOK, EMPTY)] or theirs[:1]


def _is_wanted(path: Path) -> bool:
    return path.name.lower().endswith((".ipynb", ".zip"))


def _problem_of(path: Path) -> str:
    """Explain why this is no file to open; "" if it is one. A pipe or a device could never end."""
    status = path.lstat()
    if not _is_wanted(path):
        return NO_NOTEBOOK
    if stat.S_ISLNK(status.st_mode):
        return "it is a link; hand in the file itself"
    if not stat.S_ISREG(status.st_mode):
        return "it is no ordinary file"
    if not os.access(path, os.R_OK):
        return "you may not read it"
    if not path.name.lower().endswith(".zip") and status.st_size > LARGEST_BYTES:
        return (f"it has {status.st_size:,} bytes, and a notebook may have {LARGEST_BYTES:,}: "
                f"clear its outputs, save it and upload it again")
    return ""


def _unpack(path: Path, name: str, when: datetime, into: Path) -> list[HandIn]:
    """Unpack the notebooks in a zip, into files that the zip's names don't choose."""
    found: list[HandIn] = []
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if _is_handed_in(m.filename)]
            nbytes = sum(member.file_size for member in members)
            if nbytes > LARGEST_ZIP_BYTES or len(members) > LARGEST_ZIP_FILES:
                return [HandIn("", name, path, when, f"it has {len(members):,} notebooks, of "
                               f"{nbytes:,} bytes in all; it may have {LARGEST_ZIP_FILES}, of "
                               f"{LARGEST_ZIP_BYTES:,}")]
            found = [_unpack_one(archive, member, _one_line(f"{name}/{member.filename}"), when,
                                 into) for member in members]
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return [HandIn("", name, path, when, f"it is no zip: {error}")]
    return found or [HandIn("", name, path, when, "there is no notebook in it")]


def _is_handed_in(member: str) -> bool:
    """Is this member of a zip a notebook, and not what a Mac or an editor keeps beside it?"""
    *folders, name = member.replace("\\", "/").split("/")
    return (name.lower().endswith(".ipynb") and not name.startswith("._")
            and not any(map(_IGNORED.match, folders)))


def _unpack_one(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, when: datetime,
                into: Path) -> HandIn:
    try:
        with archive.open(member) as source:
            data = source.read(LARGEST_BYTES + 1)  # whatever size the zip says
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError,
            EOFError) as error:
        return HandIn("", name, into, when, f"it can't be unpacked: {error}")
    if len(data) > LARGEST_BYTES:
        return HandIn("", name, into, when, f"it has more than {LARGEST_BYTES:,} bytes")
    saved = datetime.min
    with contextlib.suppress(ValueError):  # some programs write no date
        saved = datetime(*member.date_time)
    file = into / f"{hashlib.sha256(name.encode() + data).hexdigest()[:16]}.ipynb"
    into.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return HandIn("", name, file, when, saved=saved)
