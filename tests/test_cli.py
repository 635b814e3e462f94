"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dtlab
from dtlab.cli import doctor, lab, loaded, show
from dtlab.cli.errors import exit_code
from dtlab.collectives import ALGORITHMS
from dtlab.errors import RunTimeout
from dtlab.grading import isolation
from dtlab.models import SHAPES
from dtlab.parallel import planner
from tests.commands import assert_bad_input, call, data

COMMANDS = ("doctor", "lab", "demo", "simulate", "bench", "plan", "train", "testbed", "grade",
            "release")


# ---- all commands ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_and_explains_itself(name: str) -> None:
    assert name in call("--help").output
    command = loaded(name)
    parts = getattr(command, "commands", {})
    for words in ([], *([part] for part in parts)):
        result = call(name, *words, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output
    for each in (command, *parts.values()):  # no line breaks where the source's do
        assert "\n" not in each.help.replace("\n\n", "")


def test_what_took_too_long_has_failed_and_was_no_bad_input() -> None:
    assert exit_code(RunTimeout("late")) == 1
    assert exit_code(FileNotFoundError("x")) == 2


def test_the_version_is_the_packages() -> None:
    assert call("--version").output.strip() == f"dtlab {dtlab.__version__}"


def script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, as a shell starts it."""
    return subprocess.run([sys.executable, "-m", "dtlab", *words], capture_output=True, text=True,
                          env=os.environ | environment, stdin=subprocess.DEVNULL, timeout=60)


def test_it_starts_without_what_only_some_commands_need() -> None:
    loaded = "import dtlab.cli, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True,
                             check=True).stdout.split()
    assert not {"torch", "numpy", "matplotlib"} & set(modules)


def test_an_error_is_one_sentence_and_debug_shows_where() -> None:
    words = ("simulate", "all_reduce", "-p", "0")
    assert_bad_input(call(*words), "dtlab: ranks must be a whole number, 1 or more, not 0\n")
    full = script(*words, "--debug")
    assert full.returncode != 0
    assert "Traceback" in full.stderr
    assert "ConfigError" in full.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("simulate", "all_reduce", "-p", "2"), ("--version",)])
def test_a_full_disk_is_the_systems_word(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        told = subprocess.run([sys.executable, "-m", "dtlab", *words], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60)
    assert told.returncode == 2
    assert told.stderr == "dtlab: the system says: No space left on device\n"


def test_an_unknown_command_or_option_is_bad_input() -> None:
    typo = call("simulat")
    assert typo.exit_code == 2
    assert "Did you mean 'simulate'?" in " ".join(typo.stderr.split())
    assert call("simulate", "all_reduce", "--rank", "4").exit_code == 2


# ---- simulate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", list(ALGORITHMS))
def test_simulate_prints_every_algorithm_and_agrees_with_the_closed_form(collective: str) -> None:
    rows = data("simulate", collective, "--ranks", "6", "--bytes", "1200B", "--latency", "3us",
                "--bandwidth", "1GB/s", "--gamma", "0.5ns")
    assert [row["algorithm"] for row in rows] == list(ALGORITHMS[collective])
    for row in rows:
        if row["closed_form_is_exact"]:
            assert row["simulated_s"] == pytest.approx(row["closed_form_s"], rel=1e-9)
        else:
            assert row["simulated_s"] <= row["closed_form_s"] * (1 + 1e-9)
        assert row["sent_bytes_by_rank"] == dtlab.cost.sent_bytes(
            collective, row["algorithm"], 6, 1200)
        assert row["messages_by_rank"] == dtlab.cost.messages(
            collective, row["algorithm"], 6, 1200)


def test_simulate_of_one_algorithm_prints_the_textbooks_numbers() -> None:
    (row,) = data("simulate", "all_reduce", "--algorithm", "ring", "--ranks", "8",
                  "--bytes", "100MB", "--latency", "5us", "--bandwidth", "10GB/s")
    assert row["simulated_s"] == pytest.approx(2 * 7 * 5e-6 + 2 * 7 / 8 * 100e6 / 10e9, rel=1e-9)
    assert row["rounds"] == 14
    table = call("simulate", "all_reduce", "-a", "ring")
    assert "17.6 ms" in table.output
    assert "175 MB" in table.output


def test_simulate_puts_the_fastest_first_and_fits_options_to_the_cluster() -> None:
    table = call("simulate", "all_reduce", "-t", "v100_nvlink", "-n", "160MB").output
    assert [line.split()[0] for line in table.splitlines()[2:4]] == ["two_ring", "double_tree"]
    assert "Fitted to this cluster: two_ring (cycles=6 rings), torus (shape=(4, 2))" in table
    rows = {row["algorithm"]: row for row in data("simulate", "all_reduce", "-t", "v100_nvlink",
                                                  "-n", "160MB")}
    assert rows["two_ring"]["simulated_s"] < 0.2 * rows["ring"]["simulated_s"]
    assert len(rows["two_ring"]["options"]["cycles"]) == 6


@pytest.mark.parametrize("words", [("all_reduce",), ("all_reduce", "-t", "racks:4x8"),
                                   ("barrier",)])
def test_simulate_marks_the_fastest_and_only_those(words: tuple[str, ...]) -> None:
    rows = {row["algorithm"]: row for row in data("simulate", *words)}
    least_s = min(row["simulated_s"] for row in rows.values())
    table = call("simulate", *words).output
    assert "★ fastest, and all within 1% of it." in table
    lines = table.splitlines()[2:2 + len(rows)]
    assert "★" in lines[0]
    assert "★" not in lines[-1]
    for line in lines:
        row = rows[line.split()[0]]
        assert row["fastest"] == ("★" in line) == (row["simulated_s"] <= 1.01 * least_s)


def test_simulate_of_one_algorithm_marks_nothing_and_says_at_most_where_its_form_is_a_bound(
) -> None:
    exact, bound = (call("simulate", "all_reduce", "-a", name).output
                    for name in ("ring", "two_ring"))
    for mark in ("★", "fastest", "≤ "):
        assert mark not in exact
    assert "≤ " in bound


def test_simulate_states_the_bound_and_no_bytes_of_a_barrier() -> None:
    table = call("simulate", "barrier", "-p", "8", "--latency", "5us").output
    assert table.startswith("barrier on uniform")
    assert "one message at a time, none takes less than 15 µs" in table


@pytest.mark.parametrize("cluster", ["uniform", "racks:2x4", "torus:4x4"])
def test_simulate_fits_80_columns_and_knows_all_rounds(cluster: str) -> None:
    _, head, *lines = call("simulate", "all_reduce", "-t", cluster).output.splitlines()
    assert max(map(len, lines[:12])) <= 80
    rounds = [line[: head.index("rounds") + len("rounds")].split()[-1] for line in lines[:12]]
    assert all(count.isdigit() for count in rounds)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_loses_no_figure(width: int, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(show, "console", lambda: Console(width=width))
    show.table("", ("layout", "step", "tokens/s a device", "memory", "utilization"), [
        ("dp=16,tp=4, 32 × 1, ZeRO 3, selective recomputation, sequence", "73.9 s", "887",
         "52.4 GB", "43%")])
    printed = capsys.readouterr().out
    for text in ("dp=16,tp=4,", "recomputation,", "73.9 s", "887", "52.4 GB", "43%", "utilization"):
        assert text in printed


def test_simulate_writes_a_picture_and_a_trace(tmp_path: Path) -> None:
    picture, trace = tmp_path / "ring.png", tmp_path / "ring.json"
    result = call("simulate", "all_reduce", "-a", "ring", "-p", "3", "-n", "12kB",
                  "--plot", str(picture), "--chrome", str(trace))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_takes_a_topology_by_name_or_from_a_file(tmp_path: Path) -> None:
    picture, file = tmp_path / "ring.svg", tmp_path / "torus.yaml"
    (row,) = data("simulate", "all_reduce", "-a", "ring", "--topology", "torus:4x4", "-n", "16kB",
                  "--plot", str(picture))
    assert row["ranks"] == 16
    assert row["closed_form_s"] is None  # there is none but for uniform clusters
    assert picture.exists()
    dtlab.topology.save(dtlab.topology.torus(4, 4), file)
    (again,) = data("simulate", "all_reduce", "-a", "ring", "--topology", str(file), "-n", "16kB")
    assert again["ranks"] == 16
    table = call("simulate", "all_reduce", "--topology", "nvswitch:2@racks:2x2", "-n", "16kB")
    assert table.exit_code == 0, table.output
    assert "closed form" not in table.output
    assert "8" in table.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["all_reduce", "--topology", "torus:4x4", "-p", "16"], "--ranks is for --topology uni"),
        (["all_reduce", "-t", "torus:4"], "torus:XxY"),
        (["all_reduce", "-t", "/nowhere.yaml"], "can't be read"),
        (["all_reduce", "-t", "torus:100x100"], "4096"),
        (["all_reduc"], "did you mean 'all_reduce'? choose one of "),
        (["all_reduce", "-a", "rings"], "ring"),
        (["all_reduce", "-p", "-1"], "1 or more, not -1"),
        (["all_reduce", "-p", "10000"], "4096"),
        (["all_reduce", "-n", "100Mb"], "write bytes"),
        (["all_reduce", "-n", "13"], "13 bytes"),
        (["all_reduce", "--latency=-1us"], "0 or more"),
        (["all_reduce", "--bandwidth", "0GB/s"], "more than 0"),
        (["all_reduce", "--bandwidth", "fast"], "10GB/s"),
        (["all_reduce", "--gamma=-1ns"], "'-1ns' is not a time"),
        (["all_reduce", "--network", "torus9"], "uniform"),
        (["all_reduce", "--dtype", "float3"], "float32"),
        (["all_reduce", "--plot", "x.png"], "--algorithm"),
        (["all_reduce", "-a", "ring", "--plot", "/nowhere/x.png"], "/nowhere/x.png"),
        (["all_reduce", "-a", "ring", "--plot", "x.docx"], "docx"),
        (["all_reduce", "-a", "ring", "--chrome", "/nowhere/x.json"], "there is no folder /now"),
    ],
)
def test_simulate_says_what_is_wrong_with_its_input(words: list[str], told: str) -> None:
    assert_bad_input(call("simulate", *words), told)


# ---- plan --------------------------------------------------------------------------------------


def test_plan_prints_what_the_planner_finds(tmp_path: Path) -> None:
    words = ("plan", "--model", "gpt2-xl", "--cluster", "a100:1x4", "--batch", "16")
    found = data(*words)
    _, topology = planner.cluster("a100:1x4")
    plans = planner.plan(SHAPES["GPT-2 XL"], topology, 16)
    assert found["layouts"] == len(plans)
    assert found["plans"][0]["step_s"] == plans[0].step_s
    assert found["ties"] == len(planner.ties(plans))
    picture = tmp_path / "plans.png"
    page = call(*words, "--top", "2", "--plot", str(picture))
    assert page.exit_code == 0
    assert str(plans[0].layout) in page.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("change", "told"), [
    ({"--model": "llama3-70x"}, "did you mean 'Llama 3 70B'?"), ({"--cluster": "8x8"}, "h100:8x8"),
    ({"--software": "old"}, "no software 'old'; choose one of"), ({"--precision": "int4"}, "'fp8'"),
    ({"--model": "llama3-405b"}, "nothing fits 4 devices"),
    ({"--model": "llama3-405b", "--cluster": "a100:1x1"}, "nothing fits 1 device of"),
    ({"--positions": "0"}, "positions"),
])
def test_plan_says_what_is_wrong_with_its_input(change: dict[str, str], told: str) -> None:
    words = {"--model": "gpt2-xl", "--cluster": "a100:1x4", "--batch": "16"} | change
    assert_bad_input(call("plan", *(word for pair in words.items() for word in pair)), told)


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_finds_this_machine_ready() -> None:
    found = data("doctor")
    assert found["ok"] is True
    names = [check["name"] for check in found["checks"]]
    assert {"Python", "PyTorch", "Gloo", "CUDA", "Cores", "Loopback", "JupyterLab",
            "Two ranks"} <= set(names)


def test_doctor_names_each_fault_and_its_remedy_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ranks fail, and after a check that breaks."""
    def memory() -> doctor.Finding:
        raise RuntimeError("no idea")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise dtlab.RankDied("rank 1 was killed by SIGKILL", 1, -9)

    monkeypatch.setattr(doctor.torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dtlab, "run", broken)
    monkeypatch.setattr(doctor, "CHECKS", (memory, doctor.gloo, doctor.two_ranks, doctor.python))
    result = call("doctor")
    assert result.exit_code == 1
    for told in ("no idea", "✗ Gloo", "make setup", "SIGKILL"):
        assert told in result.output
    as_json = call("doctor", "--json")
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)
    assert found["ok"] is False
    assert [check["state"] for check in found["checks"]] == ["fault", "fault", "fault", "ok"]
    assert all(check["remedy"] for check in found["checks"][:3])


def test_doctor_finds_what_surrounds_the_course(monkeypatch: pytest.MonkeyPatch,
                                                tmp_path: Path) -> None:
    """A limit on files, a clone that can't be written, a sandbox that doesn't work here."""
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert "ulimit -f unlimited" in doctor.file_size().remedy
    monkeypatch.setattr(doctor.lab, "course_folder", lambda: tmp_path)
    assert doctor.course().state == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    finding = doctor.course()
    assert (finding.state, finding.remedy) == (
        "fault", f"copy the clone to a folder of yours: cp -r {tmp_path} ~/dtlab")
    monkeypatch.setattr(isolation, "_obstacle", lambda _: "does not work here (Operation not "
                                                          "permitted)")
    for there, state in (("/usr/bin/bwrap", "fault"), (None, "note")):
        monkeypatch.setattr(doctor.shutil, "which", lambda _, there=there: there)
        finding = doctor.sandbox()
        assert finding.state == state
        assert "does not work here" in finding.detail
        assert "apt install bubblewrap" in finding.remedy


# ---- lab ---------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "dtlab").mkdir()
    (tmp_path / "dtlab" / "comm.py").touch()
    (tmp_path / "notebooks").mkdir()
    for name in ("05_all_reduce.ipynb", "00_welcome.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    return tmp_path


def test_lab_finds_the_course_from_any_folder_inside(checkout: Path) -> None:
    deep = checkout / "notebooks" / "pictures"
    deep.mkdir()
    assert lab.course_folder(deep) == checkout


def test_lab_says_where_the_course_is_when_it_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab.dtlab, "__file__", str(tmp_path / "site" / "dtlab" / "__init__.py"))
    assert_bad_input(call("lab"), "make lab")


def test_lab_starts_at_the_first_chapter_and_obeys_no_browser(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTLAB_NO_BROWSER", raising=False)
    words = lab.command_line(checkout, browser=True, port=8899)
    assert lab.first_page(checkout) == "/lab/tree/notebooks/00_welcome.ipynb"
    assert f"--LabApp.default_url={lab.first_page(checkout)}" in words
    assert "--ServerApp.port=8899" in words
    assert "--no-browser" not in words
    assert "--no-browser" in lab.command_line(checkout, browser=False, port=8899)
    monkeypatch.setenv("DTLAB_NO_BROWSER", "1")
    assert "--no-browser" in lab.command_line(checkout, browser=True, port=8899)


def test_lab_copies_the_course_and_never_overwrites_what_a_learner_changed(checkout: Path) -> None:
    chapter, other = (checkout / "notebooks" / name for name in ("05_all_reduce.ipynb",
                                                                 "00_welcome.ipynb"))
    mine, revised = lab.copy_course(checkout)
    assert (revised, mine) == ([], checkout / "my_course")
    copy = mine / "notebooks" / chapter.name
    copy.write_text("answers")
    for original in (chapter, other):
        original.write_text("second edition")
    assert lab.copy_course(checkout)[1] == ["notebooks/05_all_reduce.ipynb"]
    assert copy.read_text() == "answers"
    assert (mine / "notebooks" / other.name).read_text() == "second edition"
    copy.rename(copy.with_name("05_mine.ipynb"))
    assert lab.copy_course(checkout)[1] == []
    assert copy.read_text() == "second edition"


def test_lab_hands_over_to_jupyterlab_in_the_learners_copy(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, Any] = {}
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("JUPYTER_TOKEN", "")
    monkeypatch.setattr(os, "execv", lambda path, words: called.update(words=words, at=os.getcwd()))
    for options, folder in (([], checkout / "my_course"), (["--originals"], checkout)):
        monkeypatch.chdir(checkout)
        result = call("lab", "--no-browser", *options)
        assert result.exit_code == 0, result.output
        assert called["words"][1:3] == ["-m", "jupyterlab"]
        assert Path(called["at"]) == folder


@pytest.mark.parametrize("port", [0, -5, 99999])
def test_lab_refuses_what_is_no_port(port: int) -> None:
    assert call("lab", "--port", port).exit_code == 2


def test_lab_takes_a_token_and_loopback_whatever_the_user_has_configured(
    checkout: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "config"
    theirs.mkdir()
    (theirs / "jupyter_server_config.py").write_text(
        "c.ServerApp.ip = '0.0.0.0'\nc.IdentityProvider.token = ''\n")
    words = lab.command_line(checkout, browser=False, port=8888)
    result = subprocess.run(
        [*words[:4], "--show-config-json", "--allow-root"], capture_output=True, text=True,
        timeout=60, check=True,
        env=os.environ | {"JUPYTER_CONFIG_DIR": str(theirs), "JUPYTER_TOKEN": "secret"})
    shown = json.loads(result.stdout)
    assert shown["ServerApp"]["ip"] == "127.0.0.1"
    assert shown["IdentityProvider"]["token"] == "secret"


# ---- demo --------------------------------------------------------------------------------------


def test_demo_shows_ranks_traffic_and_a_named_deadlock() -> None:
    assert_bad_input(call("demo", "-p", "1"), "the tour needs 2 ranks or more")
    result = script("demo")
    assert result.returncode == 0, result.stderr
    for told in ("[rank 3]", "messages sent", "closed form", "deadlock", "pass_on.py:4"):
        assert told in result.stdout, result.stdout
