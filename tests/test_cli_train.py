"""`dtlab train`: the same losses on every mesh, also under torchrun; one sentence if it cannot."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy

from dtlab.cli import errors
from dtlab.models import GPT, GPTConfig, text_batch
from tests.commands import assert_bad_input, call, data

SIZES = ("--layers", "2", "--hidden", "32", "--context", "16", "--batch", "8", "--lr", "0.003")
CONFIG = GPTConfig(layers=2, hidden=32, context=16)
STEPS = 4


def train(*words: str) -> Any:
    return call("train", "--steps", STEPS, *SIZES, *words)


def losses(*words: str) -> list[float]:
    found: list[float] = data("train", "--steps", STEPS, *SIZES, *words)["losses"]
    return found


def one_device(steps: int = STEPS, dtype: torch.dtype = torch.float64, seed: int = 0
               ) -> list[float]:
    gpt = GPT(CONFIG, seed=seed, dtype=dtype)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.003)
    seen = []
    for step in range(steps):
        tokens, targets = text_batch(step, 8, 16, seed)
        loss = cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize("words", [
    ("--mesh", "tp=2", "--sequence"),
    ("--mesh", "pp=2", "--schedule", "zb_v", "--micro-batches", "4", "--recompute"),
    ("--mesh", "dp=2", "--zero", "3", "--seed", "7"),
])
def test_every_mesh_has_the_losses_of_one_device(words: tuple[str, ...]) -> None:
    seed = 7 if "--seed" in words else 0
    assert losses(*words, "--dtype", "float64") == pytest.approx(one_device(seed=seed), rel=1e-12)
    in_float32 = one_device(dtype=torch.float32, seed=seed)
    assert losses(*words) == pytest.approx(in_float32, rel=1e-6)


def test_a_checkpoint_goes_on_on_another_mesh_and_no_other_is_taken(tmp_path: Path) -> None:
    folder, other = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    exact = ("--dtype", "float64")
    first = losses("--mesh", "dp=2", "--zero", "1", *exact, "--save", str(folder))
    more = losses("--mesh", "pp=2", *exact, "--load", str(folder), "--save", str(other))
    assert first + more == pytest.approx(one_device(2 * STEPS), rel=1e-12)
    (folder / "1" / "rank1.pt").write_bytes(b"")
    for words, says in [
        ((*exact, "--load", str(folder)), "rank1.pt is corrupt"),
        (("--load", str(other)), "a model with --dtype float64, not float32"),
        ((*exact, "--heads", "2", "--load", str(other)), "a model with --heads 4, not 2"),
        (("--load", str(tmp_path)), "holds no checkpoint"),
        (("--save", str(tmp_path)), "exists and is not a checkpoint"),
        (("--save", str(other / "latest" / "third")), "File exists"),
    ]:
        assert_bad_input(train(*words), says)


def test_it_says_how_it_went_and_writes_a_picture_and_a_trace(tmp_path: Path) -> None:
    picture, trace = tmp_path / "loss.png", tmp_path / "trace.json"
    result = train("--mesh", "tp=2", "--plot", str(picture), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    for told in (f"in {STEPS} steps of ", "loss 5.", " → ", "tokens/s", "B"):
        assert told in line
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {row["args"]["name"] for row in json.loads(trace.read_text())["traceEvents"]
             if row["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}


def test_a_loss_that_is_no_number_is_null() -> None:
    found = losses("--lr", "1e12", "--mesh", "dp=1")
    assert found[0] > 5
    assert found[-1] is None


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "says"), [
    (["--mesh", "dp=2,cp=2"], "no axis of --mesh 'cp'; "),
    (["--mesh", "dp"], "as in pp=2,dp=2,tp=2, not 'dp'"),
    (["--mesh", "dp=2,dp=2"], "different axes"),
    (["--mesh", "dp=0"], "not 'dp=0'"),
    (["--mesh", "dp=4000", "--batch", "4000"], "ranks=4000"),
    (["--schedule", "1f1b"], "no schedule '1f1b'; choose one of dualpipe_v, gpipe"),
    (["--zero", "4"], "not 4"),
    (["--mesh", "pp=2", "--zero", "3"], "on a mesh without pp, 3"),
    (["--mesh", "tp=3"], "tp=3 ranks can't share --heads 4 evenly"),
    (["--mesh", "tp=4", "--sequence", "--context", "15"], "can't share --context 15"),
    (["--mesh", "pp=5", "--batch", "10"], "the output, make no 5 stages"),
    (["--mesh", "pp=4", "--schedule", "interleaved"], "make no 8 stages"),
    (["--mesh", "dp=2", "--micro-batches", "3"], "--batch 8 can't be cut for dp=2"),
    (["--micro-batches", "0"], "--micro-batches must lie between 1"),
    (["--steps", "0"], "--steps must lie between 1"),
    (["--seed", "-1"], "--seed must lie between 0"),
    (["--lr", "nan"], "--lr must be a number"),
    (["--hidden", "33"], "4 heads don't divide hidden=33"),
    (["--layers", "-1"], "layers must be a whole number, 1 or more"),
    (["--context", "10000000"], "longer than the text"),
    (["--dtype", "int8"], "no dtype 'int8'; choose one of float32"),
    (["--plot", "x.docx"], ".png"),
    (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
    (["--trace", "/nowhere/x.json"], "there is no folder /nowhere"),
    (["--trace", "/"], "there is a folder of that name"),
])
def test_what_makes_no_sense_is_one_sentence_before_any_process_starts(
        words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("dtlab.processes.run"), "RankGroup", None)
    assert_bad_input(train(*words), says)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mesh_that_is_not_torchruns_is_bad_input_of_which_rank_0_speaks(
        rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("MASTER_ADDR", ""), ("MASTER_PORT", 1),
                        ("TORCHELASTIC_RUN_ID", "job")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(errors, "TELL_S", 0)
    result = train("--mesh", "dp=4,tp=2")
    if rank:
        assert (result.exit_code, result.output) == (2, "")
    else:
        assert_bad_input(result, "dp=4 · tp=2 has 8 ranks, but torchrun has started 4")


# ---- processes of their own ----------------------------------------------------------------------


@pytest.mark.slow
def test_under_torchrun_the_same_line_has_the_same_losses_and_rank_0_prints() -> None:
    words = ("--mesh", "pp=2,dp=2", "--zero", "1", "--dtype", "float64", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
         "-m", "dtlab", "train", "--steps", str(STEPS), *SIZES, *words],
        capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(one_device(), rel=1e-12)


def test_a_terminal_sees_the_loss_while_it_trains_and_ctrl_c_ends_all() -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dtlab", "train", "--mesh", "dp=2", "--steps", "1000000", *SIZES],
        stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    while not re.search(rb"loss \d", seen):  # or the test's time is over
        seen += os.read(terminal, 4096)
    assert b"training" in seen
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert ranks
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    assert process.stdout is not None
    assert process.stdout.read() == b""
    os.close(terminal)
    until = time.monotonic() + 10
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.05)
