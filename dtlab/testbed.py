"""Several hosts in one box: network namespaces joined by virtual wires of a chosen bandwidth.

A host here has what programs know a machine by: its name, its address, its network. It shares with
the others this machine's cores, files and clock. Everything lives in namespaces that one process
holds, the first of a process namespace of its own: when it ends, the kernel ends every process of
every host and removes every wire. It ends when its standard input does, so nothing outlives the
process that made the testbed, however that one dies; and outside the box nothing is ever made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dtlab import topology
from dtlab.checks import check_amount, check_positive, check_whole
from dtlab.errors import ConfigError, RunTimeout

PORT = 29500  # where host 0 awaits torchrun's agents
_MOST_HOSTS = 64
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
          "mount": "mount", "hostname": "hostname", "env": "coreutils"}
_BURST_BYTES = 32_000  # tbf sends as much at once after a pause
_QUEUE_S = 0.2  # what waits longer than this at a link is dropped


class HostResult(NamedTuple):
    """The result of a command on one host. A negative exit code is the signal that ended it."""

    host: int
    exit_code: int
    output: str  # standard output and error, as they came


class Testbed:
    """`hosts` named host0, host1, …, evenly in `racks`; use `with`, or call `close`.

    Each host has a link of `bandwidth_Bps` in each direction to its rack's switch, and each switch
    one of `uplink_Bps` to a spine (with one rack nothing crosses it). latency_s: added by each
    link, where the kernel has netem. Raises `ConfigError` where this system makes no testbed: it
    takes Linux, iproute2, and root or a kernel that gives namespaces to everyone.

    >>> with Testbed(hosts=4, racks=2) as testbed:            # doctest: +SKIP
    ...     testbed.run(["torchrun", "--nproc-per-node", "2", "lesson.py"])
    """

    __test__ = False  # for pytest, which takes the name for a test's

    def __init__(self, hosts: int = 2, racks: int = 1, *, bandwidth_Bps: float = 50e6,
                 uplink_Bps: float = 12.5e6, latency_s: float = 0.0):
        check_whole("hosts", hosts, most=_MOST_HOSTS)
        check_whole("racks", racks, most=hosts)
        check_positive("bandwidth_Bps", bandwidth_Bps)
        check_positive("uplink_Bps", uplink_Bps)
        check_amount("latency_s", latency_s, " seconds")
        if hosts % racks:
            raise ConfigError(f"{hosts} hosts can't be shared evenly by {racks} racks")
        self.hosts, self.racks = hosts, racks
        self.bandwidth_Bps, self.uplink_Bps = bandwidth_Bps, uplink_Bps
        self.latency_s = latency_s
        self._path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        self._box = self._open()
        try:
            self._in_box("\n".join(self._wiring()))
        except BaseException:
            self.close()
            raise

    # ---- start and end --------------------------------------------------------------------------

    def _open(self) -> subprocess.Popen[str]:
        """The process that holds the box."""
        if sys.platform != "linux":
            raise ConfigError("a testbed is made of Linux's network namespaces, and this system "
                              "is not Linux")
        for tool, package in _TOOLS.items():
            if not shutil.which(tool, path=self._path):
                raise ConfigError(f"a testbed needs the command {tool!r}; install {package}")
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        box = subprocess.Popen(
            ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--mount-proc",
             "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PATH": self._path})
        assert box.stdout is not None
        if not box.stdout.readline():
            said = box.communicate()[1].strip().splitlines() or ["no reason given"]
            raise ConfigError(f"this system refuses the namespaces of a testbed ({said[-1]}); run "
                              f"it as root, outside of a container")
        return box

    def close(self) -> None:
        """End every process on every host, and remove the network."""
        if self._box.stdin and not self._box.stdin.closed:
            self._box.communicate()

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wiring(self) -> list[str]:
        """The shell's commands that make switches, hosts and links."""
        names = [f"10.0.0.{host + 1} host{host}" for host in range(self.hosts)]
        lines = ["mount -t tmpfs dtlab /run", "mkdir /run/netns /run/uts",
                 f"printf '%s\\n' '127.0.0.1 localhost' {shlex.join(names)} > /run/hosts",
                 "mount --bind /run/hosts /etc/hosts", "ip link set lo up",
                 "ip link add spine type bridge", "ip link set spine up"]
        for rack in range(self.racks):
            lines += [f"ip link add rack{rack} type bridge", f"ip link set rack{rack} up",
                      f"ip link add up{rack} type veth peer name down{rack}",
                      f"ip link set up{rack} master rack{rack} up",
                      f"ip link set down{rack} master spine up",
                      *self._shaped("", f"up{rack}", self.uplink_Bps),
                      *self._shaped("", f"down{rack}", self.uplink_Bps)]
        for host in range(self.hosts):
            name, there = f"host{host}", f"-n host{host}"
            lines += [f"ip netns add {name}", f"touch /run/uts/{name}",
                      f"unshare --uts=/run/uts/{name} hostname {name}",
                      f"ip link add to{host} type veth peer name eth0 netns {name}",
                      f"ip link set to{host} master rack{host * self.racks // self.hosts} up",
                      f"ip {there} address add 10.0.0.{host + 1}/24 dev eth0",
                      f"ip {there} link set lo up", f"ip {there} link set eth0 up",
                      *self._shaped(there, "eth0", self.bandwidth_Bps),
                      *self._shaped("", f"to{host}", self.bandwidth_Bps)]
        return lines

    def _shaped(self, there: str, device: str, rate_Bps: float) -> list[str]:
        """The commands that shape what leaves by `device`."""
        add, parent = f"tc {there} qdisc add dev {device}", "root"
        delay = []
        if self.latency_s:
            delay = [f"{add} root handle 1: netem delay {self.latency_s * 1e6:.0f}us"]
            parent = "parent 1:1"
        return [*delay, f"{add} {parent} tbf rate {rate_Bps * 8:.0f}bit burst {_BURST_BYTES} "
                        f"latency {_QUEUE_S * 1e3:.0f}ms"]

    def _in_box(self, script: str) -> str:
        """Run a shell's script beside the switches; returns what it prints."""
        done = subprocess.run([*self._enter(), "sh", "-e"], input=script, capture_output=True,
                              text=True, env=os.environ | {"PATH": self._path})
        if done.returncode:
            if self.latency_s and "qdisc kind is unknown" in done.stderr:
                raise ConfigError(f"latency_s={self.latency_s}: this kernel has no netem, so links "
                                  f"can't be given a latency; leave it out")
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ConfigError(f"this system refuses a part of the testbed: {said[0]}")
        return done.stdout

    def _check_host(self, host: int) -> None:
        check_whole("host", host, least=0, most=self.hosts - 1)

    def _enter(self, host: int | None = None) -> list[str]:
        """The command by which another one runs in the box, or on a host."""
        here = f"/proc/{self._box.pid}"
        user = [] if os.geteuid() == 0 else [f"--user={here}/ns/user", "--preserve-credentials"]
        spaces = {"net": f"{here}/ns/net"}
        if host is not None:
            self._check_host(host)
            spaces = {kind: f"{here}/root/run/{folder}/host{host}"
                      for kind, folder in (("net", "netns"), ("uts", "uts"))}
        return ["nsenter", *user, *(f"--{kind}={path}" for kind, path in spaces.items()),
                f"--mount={here}/ns/mnt", f"--pid={here}/ns/pid_for_children"]

    # ---- use ------------------------------------------------------------------------------------

    def start(self, host: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on one host, in this folder and environment; its output is a pipe.

        torchrun finds in its environment how many hosts there are, and where they meet.
        """
        python = os.path.dirname(sys.executable)
        meet = {"PET_NNODES": str(self.hosts), "PET_RDZV_BACKEND": "c10d",
                "PET_RDZV_ENDPOINT": f"host0:{PORT}", "PET_RDZV_ID": "testbed"}
        return subprocess.Popen(
            [*self._enter(host), "env", f"--chdir={os.getcwd()}", *command], text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors="replace", start_new_session=True,
            env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",  # host names it looks up
                 **os.environ, "PATH": f"{python}:{self._path}", **meet})

    def run(self, command: Sequence[str], timeout: float | None = None,
            show: Callable[[int, str], Any] | None = None) -> list[HostResult]:
        """Run a command on every host; `show` gets each line of output with its host's number.

        Raises `RunTimeout` after `timeout` seconds, and ends it everywhere.
        """
        if timeout is not None:
            check_positive("timeout", timeout)
        lines: list[list[str]] = [[] for _ in range(self.hosts)]

        def read(host: int, process: subprocess.Popen[str]) -> None:
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    lines[host].append(line)
                    if show:
                        show(host, line)

        running = [self.start(host, command) for host in range(self.hosts)]
        readers = [threading.Thread(target=read, args=one, daemon=True)
                   for one in enumerate(running)]
        for reader in readers:
            reader.start()
        until = None if timeout is None else time.monotonic() + timeout
        try:
            for process in running:
                process.wait(None if until is None else max(0.0, until - time.monotonic()))
        except BaseException as error:
            for host in range(self.hosts):
                self.kill(host)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunTimeout(f"{command[0]} did not end within {timeout} s on host "
                                 f"{running.index(process)}") from None
            raise
        finally:
            for reader in readers:
                reader.join(1.0)  # a process in the background may hold the pipe for ever
        return [HostResult(host, process.returncode, "".join(lines[host]))
                for host, process in enumerate(running)]

    def kill(self, host: int) -> None:
        """Kill all processes on a host at once, as if its power failed."""
        self._check_host(host)
        with contextlib.suppress(ConfigError):
            self._in_box(f"while pids=$(ip netns pids host{host}) && [ -n \"$pids\" ]; do "
                         f"kill -{int(signal.SIGKILL)} $pids || true; sleep 0.02; done")

    def cut(self, host: int) -> None:
        """Take a host's link down: what is sent either way is lost, and nobody is told."""
        self._check_host(host)
        self._in_box(f"ip link set to{host} down")

    def restore(self, host: int) -> None:
        """Take the link of a host up again."""
        self._check_host(host)
        self._in_box(f"ip link set to{host} up")

    def uplink_bytes(self, rack: int = 0) -> int:
        """Bytes that have gone up from a rack to the spine, as its card counts: frames, headers
        and all."""
        check_whole("rack", rack, least=0, most=self.racks - 1)
        (link,) = json.loads(self._in_box(f"ip -json -statistics link show up{rack}"))
        return int(link["stats64"]["tx"]["bytes"])

    @property
    def topology(self) -> topology.Topology:
        """The same hosts and links for `dtlab.simulate`, a rank on each host."""
        each = self.hosts // self.racks
        return topology.racks(self.racks, each, oversubscription=each * self.bandwidth_Bps
                              / self.uplink_Bps, latency_s=self.latency_s,
                              bandwidth_Bps=self.bandwidth_Bps)
