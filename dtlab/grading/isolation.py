"""The sandboxes of a submission's processes: what these can see of this machine.

    bubblewrap  own namespaces, no network, no files but Python, its libraries, the parts of this
                package that the answer may use, and an empty home in memory
    nobody      the user nobody, for root in a container that allows no namespaces; secret files
                must be unreadable to others
    none        the user who grades: for one's own code only

In all of them, on Linux, each rank may only make the system calls of `system_calls`.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import dtlab
from dtlab.errors import ConfigError
from dtlab.grading.absent import PRESENT, taken_out
from dtlab.grading.system_calls import can_restrict

SANDBOXES = ("bubblewrap", "nobody", "none")
PACKAGE = Path(dtlab.__file__).resolve().parent
SECRET = PACKAGE / "grading" / "exercises"  # oracles, and fingerprints of mistakes
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
_SAME_CPU = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "LD_LIBRARY_PATH")  # bits of results depend on it
HOME = "/home/learner"
NOBODY = 65534


def choose_sandbox(name: str | None = None) -> str:
    """The sandbox of this name, or the best that works here. `ConfigError` says how to get one."""
    if name is None:
        found = [each for each in SANDBOXES[:2] if not _obstacle(each)]
        if found:
            return found[0]
        raise ConfigError(
            f"grading runs other people's code, and this machine has no sandbox: bubblewrap "
            f"{_obstacle('bubblewrap')}; install it (Debian, Ubuntu: apt install bubblewrap "
            f"libseccomp2), or grade in a container as root; for your own code add --sandbox none")
    if name not in SANDBOXES:
        raise ConfigError(f"there is no sandbox {name!r}; choose {', '.join(SANDBOXES)}")
    if trouble := _obstacle(name):
        raise ConfigError(f"the sandbox {name} {trouble}")
    return name


@cache
def _obstacle(name: str) -> str:
    """Explain why this sandbox does not work here; "" if it does."""
    if name == "none":
        return ""
    if not can_restrict():
        return "needs Linux and libseccomp (Debian, Ubuntu: apt install libseccomp2)"
    if name == "nobody" and os.geteuid() != 0:
        return "is for root, in a container"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "is not installed"
    try:
        tried = subprocess.run(_command(name, ["-c", "import pyseccomp"]), **_popen_options(name),
                               capture_output=True, text=True, check=False)
    except OSError as error:  # nobody may not run this Python
        return f"does not work here ({error})"
    return "" if tried.returncode == 0 else f"does not work here ({tried.stderr.strip()[-200:]})"


def check_secrets(folders: list[Path]) -> None:
    """For the sandbox nobody, raise `ConfigError` unless others can read none of these folders."""
    for folder in [SECRET, *folders]:
        if folder.exists() and not _hidden_from_others(folder.resolve()):
            raise ConfigError(f"the sandbox nobody can't hide {folder}, which every user may read: "
                              f"chmod -R go-rwx {folder}")


def _hidden_from_others(path: Path) -> bool:
    """Do the permissions of this path, or of a folder above it, keep other users out?"""
    own = path.stat().st_mode
    if not own & (stat.S_IROTH | stat.S_IXOTH):
        return True
    return any(not folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def start_isolated(sandbox: str, arguments: list[str], fd: int, library: Sequence[str] = ()
                   ) -> subprocess.Popen[bytes]:
    """Start Python with these arguments in bubblewrap or as nobody, with one open descriptor.
    library: the parts of this package that the process can import besides `PRESENT`."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(_command(sandbox, arguments, library), pass_fds=[fd],
                            **_popen_options(sandbox), stdin=quiet, stdout=quiet, stderr=quiet,
                            start_new_session=True)


def _command(sandbox: str, arguments: list[str], library: Sequence[str] = ()) -> list[str]:
    wrapper = bubblewrap(library) if sandbox == "bubblewrap" else []
    return [*wrapper, sys.executable, "-s", "-P", *arguments]


def _popen_options(sandbox: str) -> dict[str, Any]:
    """Folder, environment and user."""
    options: dict[str, Any] = {"cwd": "/", "env": environment()}
    if sandbox == "nobody":
        options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return options


def environment() -> dict[str, str]:
    """Return all environment variables of a submission's processes: none of the teacher's."""
    own = {"PATH": "/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
           "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1",
           "MPLCONFIGDIR": "/tmp",  # matplotlib can't be imported without one that seems writable
           "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return own | {name: os.environ[name] for name in _SAME_CPU if name in os.environ}


def bubblewrap(library: Sequence[str] = ()) -> list[str]:
    """The bubblewrap command: a program under it sees only the paths named here. library: as in
    `start_isolated`."""
    visible = [*_SYSTEM, *{sys.prefix, sys.base_prefix, *_linked_interpreters()}]
    parts = [path for name in (*PRESENT, *library)
             for path in (PACKAGE / name, PACKAGE / f"{name}.py")
             if path.exists()]
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user",
               "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
               "--tmpfs", HOME, "--dir", "/tmp", "--dev", "/dev", "--setenv", "TMPDIR", HOME,
               "--setenv", "MPLCONFIGDIR", HOME,
               "--tmpfs", "/dev/pts"]  # no terminals: ranks could count each other's
    for path in visible:
        command += ["--ro-bind-try", path, path]
    command += ["--tmpfs", str(PACKAGE)]  # also if it lies in sys.prefix
    for part in parts:
        command += ["--ro-bind", str(part), str(part)]
    for part in (PACKAGE.joinpath(*name.split(".")) for name in taken_out(library)):
        for file in (part.with_suffix(".py"), *part.parent.glob(f"__pycache__/{part.name}.*")):
            command += ["--ro-bind", "/dev/null", str(file)]
    command += ["--tmpfs", str(SECRET), "--remount-ro", str(SECRET)]
    command += ["--remount-ro", str(PACKAGE)]
    for path in ("/dev/pts", "/dev", "/"):
        command += ["--remount-ro", path]
    return [*command, "--chdir", "/"]


def _linked_interpreters() -> list[str]:
    """The folders of the links from sys.executable to the Python program itself."""
    found, path = [], Path(sys.executable)
    while path.is_symlink():
        path = path.parent / path.readlink()
        found.append(str(path.resolve().parent.parent))
    return found
