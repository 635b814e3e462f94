"""The launch files of docs/launch: their syntax, and what they start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[1] / "docs" / "launch"
# Of `sbatch --help`, Slurm 23; a learner's file may need some more.
SBATCH = {"account", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node",
          "gpus-per-task", "gres", "job-name", "mail-type", "mail-user", "mem", "mem-per-cpu",
          "nodes", "ntasks", "ntasks-per-node", "output", "partition", "qos", "requeue",
          "reservation", "signal", "time"}


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_a_launch_file_is_a_shells_program(path: Path) -> None:
    assert path.read_text().startswith("#!/bin/bash\n")
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_knows_every_option_and_reads_it_before_the_first_command() -> None:
    head, _, body = (LAUNCH / "two_hosts.sbatch").read_text().partition("set -euo pipefail")
    options = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    assert options
    for option in options:
        found = re.fullmatch(r"--([a-z-]+)=(\S+)", option)
        assert found, option
        assert found[1] in SBATCH, option
    assert "#SBATCH" not in body
    assert all(line.startswith("#") or not line for line in head.splitlines())


def programs(folder: Path, **sources: str) -> dict[str, str]:
    """An environment in which these programs come first."""
    for name, source in sources.items():
        (folder / name).write_text(f"#!/bin/bash\n{source}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_slurm_starts_a_torchrun_on_each_host_that_meet_at_the_first(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    there = programs(tmp_path, srun='echo "$@"', scontrol="printf 'node7\\nnode8\\n'") | {
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "12345"}
    done = subprocess.run(["bash", str(LAUNCH / "two_hosts.sbatch"), "lesson.py", "a b"],
                          cwd=tmp_path, env=there, capture_output=True, text=True)
    assert done.stdout == (
        "--kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        "--rdzv-endpoint node7:22345 --rdzv-id 12345 lesson.py a b\n"), done.stderr


@pytest.mark.parametrize("bad_host", ["", "node2"])
def test_ssh_starts_all_hosts_and_fails_if_one_fails(tmp_path: Path, bad_host: str) -> None:
    ssh = f'echo "$3"; [ "$2" != "{bad_host}" ]'
    done = subprocess.run([str(LAUNCH / "ssh.sh"), "node1 node2", "lesson.py", "a b"],
                          cwd=tmp_path, env=programs(tmp_path, ssh=ssh), capture_output=True,
                          text=True)
    lines = sorted(re.sub(r"ssh-\d+", "ssh-N", line).rstrip() for line in done.stdout.splitlines())
    assert lines == [f"[{host}] cd {tmp_path} && .venv/bin/torchrun --nnodes 2 --nproc-per-node 2 "
                     f"--rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id ssh-N lesson.py "
                     f"a\\ b" for host in ("node1", "node2")], done.stderr
    assert done.returncode == bool(bad_host)


def test_ssh_without_a_script_says_how_it_is_used() -> None:
    done = subprocess.run([str(LAUNCH / "ssh.sh"), "node1"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
