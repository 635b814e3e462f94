"""`dtlab doctor`: is this machine ready for the course, and if not, what helps?"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import typer

import dtlab
from dtlab.cli import lab, show
from dtlab.cli.errors import FAILED, with_exit_codes
from dtlab.cli.options import AsJson
from dtlab.errors import DtlabError
from dtlab.machine import load
from dtlab.processes import torchrun
from dtlab.units import bytes_text, seconds_text

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SIGNS = {"ok": "✓", "note": "–", "fault": "✗"}


class Finding(NamedTuple):
    """The result of one check. A note is worth knowing; only a fault must be repaired."""

    name: str
    state: str  # "ok" | "note" | "fault"
    detail: str
    remedy: str = ""


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("Python", "ok", found)  # an older one could not have read this file


def pytorch() -> Finding:
    version = torch.__version__
    if tuple(map(int, version.split("+")[0].split(".")[:2])) >= (2, 11):
        return Finding("PyTorch", "ok", version)
    return Finding("PyTorch", "fault", version, "dtlab needs torch 2.11 or newer: make setup")


def gloo() -> Finding:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return Finding("Gloo", "ok", "built in: ranks can talk on any machine")
    return Finding("Gloo", "fault", "this torch was built without it",
                   "install torch from its official packages: make setup")


def cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", "note", "no GPU; the course needs none")
    count = torch.cuda.device_count()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    with_nccl = "with NCCL" if nccl else "without NCCL: ranks on GPUs can't talk"
    return Finding("CUDA", "ok" if nccl else "note",
                   f"{count} × {torch.cuda.get_device_name(0)}, {with_nccl}")


def cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if (usable or 1) >= 2:
        return Finding("Cores", "ok", f"{usable} usable")
    return Finding("Cores", "note", "1 usable: all works, measured speed-ups will not show",
                   "give the container or virtual machine two cores")


def memory() -> Finding:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (page * os.sysconf(f"SC_{which}_PAGES") for which in ("PHYS", "AVPHYS"))
    except (ValueError, OSError):  # macOS does not say
        return Finding("Memory", "note", "this system does not tell")
    found = f"{bytes_text(total)}, {bytes_text(free)} of it unused"
    if total >= 3.5e9:
        return Finding("Memory", "ok", found)
    return Finding("Memory", "note", found, "4 GB are comfortable: close other programs, "
                                            "or use fewer ranks")


def file_size() -> Finding:
    """Functions and results go to ranks and back through files in memory."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY or limit >= 1e9:
        return Finding("File size", "ok", "no narrow limit (ulimit -f)")
    return Finding("File size", "fault", f"files may have {bytes_text(limit)} at most (ulimit -f)",
                   "what ranks return would not fit: ulimit -f unlimited, or ask who set it")


def course() -> Finding:
    """`dtlab lab` copies it to where the learner may write."""
    try:
        folder = lab.course_folder()
    except DtlabError as error:
        return Finding("Course", "note", "no notebooks here", str(error))
    mine = lab.copy_of(folder)
    if os.access(mine if mine.exists() else mine.parent, os.W_OK):
        return Finding("Course", "ok", f"your copy is, or will be, {mine}")
    return Finding("Course", "fault", f"you may not write {mine}, where your copy belongs",
                   f"copy the clone to a folder of yours: cp -r {folder} ~/dtlab")


def sandbox() -> Finding:
    """Check the sandbox in which `dtlab grade` runs other people's code."""
    from dtlab.grading.isolation import choose_sandbox

    try:
        return Finding("Sandbox", "ok", f"{choose_sandbox()}: dtlab grade may run others' code")
    except DtlabError as error:
        state = "fault" if shutil.which("bwrap") else "note"  # it is there, and doesn't work
        what, _, remedy = str(error).partition("; ")
        return Finding("Sandbox", state, what, remedy)


def loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"ping")
                    if other.recv(4) != b"ping":
                        raise OSError("what was sent did not arrive")
    except OSError as error:
        return Finding("Loopback", "fault", f"127.0.0.1 does not work: {error}",
                       "bring the interface up (ip link set lo up) and let the firewall pass it")
    return Finding("Loopback", "ok", "127.0.0.1 carries messages")


def jupyterlab() -> Finding:
    try:
        version = importlib.metadata.version("jupyterlab")
        importlib.metadata.version("ipywidgets")
    except importlib.metadata.PackageNotFoundError as error:
        return Finding("JupyterLab", "fault", f"{error.name} is not installed", "make setup")
    return Finding("JupyterLab", "ok", f"{version}: dtlab lab opens the course")


def two_ranks() -> Finding:
    """A real all-reduce on two processes: if this works, the course works."""
    begun = time.perf_counter()
    try:
        result = dtlab.run(_sum_of_ranks, ranks=2, timeout=60, echo=False)
    except (DtlabError, OSError, EOFError) as error:
        return Finding("Two ranks", "fault", str(error).splitlines()[0],
                       "DTLAB_DEBUG=1 dtlab demo shows more; faults above may be the cause")
    took = seconds_text(time.perf_counter() - begun)
    if result.values != [1.0, 1.0]:
        return Finding("Two ranks", "fault", f"0 + 1 gave {result.values}, not 1 on both",
                       "reinstall torch: rm -r .venv, then make setup")
    return Finding("Two ranks", "ok", f"started, summed 0 + 1 and ended in {took}")


def launch_variables() -> Finding:
    """Variables by which torch's processes find each other: dtlab joins none for them alone."""
    found = [f"{name}={os.environ[name]}" for name in _LAUNCH_VARIABLES if name in os.environ]
    if not found or torchrun.started() is not None:
        return Finding("Environment", "ok", "no variable of a launcher stands in the way"
                       if not found else "started by torchrun or Slurm: dtlab.run joins its ranks")
    return Finding("Environment", "note",
                   f"{', '.join(found)}: neither torchrun nor Slurm has started this process, so "
                   f"dtlab.run starts its own ranks all the same",
                   f"torch's init_process_group would go by them: unset "
                   f"{' '.join(entry.split('=')[0] for entry in found)}")


def calibrated() -> Finding:
    """The figures by which algorithm="auto" chooses."""
    machine = load()
    bandwidth, adding = (bytes_text(1 / max(x, 1e-30)) for x in (machine.beta, machine.gamma))
    found = (f"α = {seconds_text(machine.alpha)}, o = {seconds_text(machine.overhead)}, "
             f"1/β = {bandwidth}/s, 1/γ = {adding}/s")
    if not machine.date:
        return Finding("Calibration", "note", f"never done; algorithm='auto' goes by {found}",
                       'python -c "import dtlab; dtlab.calibrate()"  (some seconds)')
    found += f", measured {machine.date} on {machine.host}"
    if machine.overhead == math.inf:
        return Finding("Calibration", "note", f"{found}; that was before o was measured",
                       'python -c "import dtlab; dtlab.calibrate()"  (some seconds)')
    return Finding("Calibration", "ok", found)


def _sum_of_ranks(comm: dtlab.Comm) -> float:
    x = torch.tensor([float(comm.rank)])
    return dtlab.collectives.all_reduce(comm, x).item()


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, pytorch, gloo, cuda, cores, memory, file_size, loopback, course, sandbox, jupyterlab,
    two_ranks, launch_variables, calibrated,
)


def examine() -> Iterator[Finding]:
    """Every check's finding, as soon as it is there. A check that breaks is a fault with its own
    name, not a crash."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:  # whatever is wrong with this machine, the others still count
            yield Finding(check.__name__, "fault", f"{type(error).__name__}: {error}",
                          "this is unforeseen: please report it, with this line")


@with_exit_codes
def doctor(as_json: AsJson = False) -> None:
    """Check that this machine is ready for the course; say what to do where it is not.

    Exit code 1 if there is a fault.
    """
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            typer.echo(f"{SIGNS[finding.state]} {finding.name:<14} {finding.detail}")
            if finding.remedy:
                typer.echo(f"  {'':<14} → {finding.remedy}")
    healthy = all(finding.state != "fault" for finding in findings)
    if as_json:
        show.json_out({"ok": healthy, "checks": [finding._asdict() for finding in findings]})
    else:
        typer.echo("Ready." if healthy else "Not ready: repair what is marked ✗.")
    if not healthy:
        raise typer.Exit(FAILED)
