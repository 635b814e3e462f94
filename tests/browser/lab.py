"""A JupyterLab of the tests' own: on loopback, with a token, gone when the tests are."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil

from dtlab.cli.lab import command_line

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT_S = 60
ORPHAN_LIMIT_S = 300  # if the tests are killed, the server ends by itself after so long

SETTINGS = {  # what would otherwise ask questions, or keep cells out of the page until scrolled to
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
}


class Lab(NamedTuple):
    """A running server: where it is, and what it serves."""

    url: str
    token: str
    folder: Path

    def address(self, notebook: str) -> str:
        """Where the browser finds a notebook, in JupyterLab's page for a single document."""
        return f"{self.url}/doc/tree/notebooks/{notebook}?token={self.token}"


@contextmanager
def running_lab(folder: Path, outputs: bool = True) -> Iterator[Lab]:
    """Serve a copy of the notebooks from `folder`, with or without the outputs that they were
    committed with; afterwards server and kernels are gone."""
    copy_notebooks(folder / "course", outputs)
    port, token = free_port(), secrets.token_hex(16)
    lab = Lab(f"http://127.0.0.1:{port}", token, folder / "course")
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(
            command(lab, port), cwd=lab.folder, env=environment(folder, token),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            wait_until_it_answers(lab, server, folder / "server.log")
            yield lab
        finally:
            stop(server)


def copy_notebooks(course: Path, outputs: bool) -> None:
    shutil.copytree(ROOT / "notebooks", course / "notebooks",
                    ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for path in course.glob("notebooks/*.ipynb") if not outputs else ():
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)


def command(lab: Lab, port: int) -> list[str]:
    """`dtlab lab`'s, and what tests need."""
    return [
        *command_line(lab.folder, browser=False, port=port), "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",  # the tests read the notebook's model
        f"--ServerApp.shutdown_no_activity_timeout={ORPHAN_LIMIT_S}",
        f"--MappingKernelManager.cull_idle_timeout={ORPHAN_LIMIT_S}",
        "--MappingKernelManager.cull_connected=True",
    ]


def environment(folder: Path, token: str) -> dict[str, str]:
    """Nothing of the user's own settings, kernels and workspaces is read or changed."""
    settings = folder / "settings"
    for plugin, values in SETTINGS.items():
        file = settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    own = {name: str(folder / name.lower()) for name in (
        "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    )}
    return os.environ | own | {"JUPYTERLAB_SETTINGS_DIR": str(settings), "PYTHONPATH": str(ROOT),
                               "JUPYTER_TOKEN": token}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_it_answers(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended at once:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not answer within {START_LIMIT_S} s:\n{log.read_text()}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, its kernels, and whatever they have started."""
    family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.terminate()  # it then shuts its kernels down itself
    try:
        server.wait(timeout=15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)
