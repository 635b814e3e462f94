"""Build .venv with pip and constraints.txt; do nothing when that is done already.

`make` calls this through scripts/setup.sh. It needs only the standard library. Whatever goes wrong
ends in one sentence; pip's own words are kept in a log beside the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "dtlab-ready"  # holds the fingerprint of what was installed; written last
UNDER_WAY = VENV / "dtlab-under-way"  # there while pip works: a .venv with it is half made
LOG = ROOT / ".venv.log"
TARGET = ".[test,teach,bench,site]"
NEEDED_GB = 3.0  # .venv takes 1.7 GB, and pip unpacks beside it

# What pip prints, and what it means. The first that matches is told.
CAUSES = [
    (r"No space left on device|Errno 28|Disk quota exceeded",
     "The disk is full: dtlab's environment needs about 3 GB in {venv}; free some and try again."),
    (r"NewConnectionError|NameResolutionError|name resolution|Max retries exceeded|ProxyError"
     r"|ConnectTimeout|ReadTimeout|Read timed out|Connection refused|Network is unreachable"
     r"|Connection(Reset|Aborted)?Error|No route to host|Could not fetch URL|SSLError",
     "pip can't reach its package index: connect to the network (or set up pip's proxy or mirror) "
     "and try again."),
    (r"Permission denied|Errno 13|Read-only file system",
     "pip may not write into {venv}: give yourself the right to (or clone dtlab elsewhere)."),
    (r"No matching distribution found for (?P<what>\S+)",
     "pip finds no {what} for Python {version} here: check the network (or pip's mirror), or try "
     "another Python, with PYTHON=/path/to/python3.12."),
]


class SetupError(Exception):
    """What went wrong, in one sentence for the person who typed `make`."""


def fingerprint() -> str:
    """Changes when .venv has to: where it stands, and what is asked for and pinned."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return f"{ROOT}\n{digest.hexdigest()}\n"


def is_ready() -> bool:
    """Is .venv complete, for just these requirements?"""
    return STAMP.exists() and PYTHON.exists() and STAMP.read_text() == fingerprint()


def make_environment() -> None:
    """An empty .venv. One that works is kept; one that is half made, broken or was moved is not."""
    moved = STAMP.exists() and STAMP.read_text().splitlines()[:1] != [str(ROOT)]
    if VENV.exists() and (moved or UNDER_WAY.exists() or not answers(PYTHON)):
        shutil.rmtree(VENV)
    if not VENV.exists():
        free_gb = shutil.disk_usage(ROOT).free / 1e9
        if free_gb < NEEDED_GB:
            raise SetupError(f"dtlab's environment needs {NEEDED_GB:.0f} GB in {VENV}, and "
                             f"{free_gb:.1f} GB are free; free some and try again.")
        VENV.mkdir()
        UNDER_WAY.touch()
        run_logged([sys.executable, "-m", "venv", str(VENV)], "making .venv")
    STAMP.unlink(missing_ok=True)


def answers(python: Path) -> bool:
    """Does this interpreter start, is it new enough, and does it have pip?"""
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    return False


def run_logged(command: list[str], doing: str) -> None:
    """Run `command`, showing on a terminal how far it is; if it fails, the log has all it said."""
    words: list[str] = []
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    assert process.stdout is not None
    for line in process.stdout:
        words.append(line)
        show(f"{doing}, {time.monotonic() - begun:.0f} s: {line.strip()}")
    show("")
    if process.wait() != 0:
        said = "".join(words)
        with contextlib.suppress(OSError):  # the disk may be full
            LOG.write_text(said)
        raise SetupError(f"{explain(said, doing)} (Log: {LOG})")


def show(line: str) -> None:
    """One line that the next one overwrites; nothing unless a person watches."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r\033[K" + line[:width])
        sys.stderr.flush()


def explain(words: str, doing: str) -> str:
    """The sentence for what the failed command printed."""
    if "ensurepip is not" in words or "No module named venv" in words:
        version = "{}.{}".format(*sys.version_info)
        return (f"This Python has no venv module: install it (Debian, Ubuntu: apt install "
                f"python{version}-venv) and try again.")
    for pattern, sentence in CAUSES:
        if found := re.search(pattern, words):
            return sentence.format(venv=VENV, version=sys.version.split()[0],
                                   **found.groupdict())
    return f"{doing.capitalize()} failed, for a reason that this script does not know."


def install() -> None:
    """Bring .venv to what pyproject.toml and constraints.txt ask for."""
    try:
        make_environment()
        run_logged([str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check",
                    "--no-input", "--progress-bar", "off", "-c", "constraints.txt", "-e", TARGET],
                   "installing")
    except SetupError:
        if UNDER_WAY.exists():
            shutil.rmtree(VENV, ignore_errors=True)  # half made: give the disk back
        raise
    if subprocess.run([PYTHON, "-c", "import torch, dtlab"], cwd=VENV,
                      capture_output=True).returncode != 0:
        raise SetupError(f"Everything is installed, but `{PYTHON} -c 'import torch, dtlab'` fails; "
                         "run it to see why.")
    STAMP.write_text(fingerprint())
    UNDER_WAY.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)


def main() -> int:
    if is_ready():
        return 0
    with open(__file__) as lock:  # two `make` at once: the second waits, then finds it done
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready():
            return 0
        begun = time.monotonic()
        print(f"Setting up dtlab in {VENV}: about 2 GB, once; some minutes on a slow network.",
              flush=True)
        install()
        print(f"Ready after {time.monotonic() - begun:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        sys.exit(f"{error}")
    except OSError as error:
        sys.exit(f"Setting up dtlab failed: {error.strerror or error} ({error.filename or VENV}).")
    except KeyboardInterrupt:
        sys.exit("Interrupted; the next `make setup` begins again.")
