"""`Session` and `%%ranks`: ranks that stay, with their variables."""

from __future__ import annotations

import gc
import os
import re
import threading
from typing import Any

import nbclient
import nbformat
import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, RankDied, RankFailed, Session
from dtlab.processes import rank_monitor
from dtlab.processes.launcher import RankGroup
from dtlab.processes.rank_monitor import RankHandle
from tests.processes.shared import wait_until_gone


def test_variables_last_from_call_to_call(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(ranks=3) as session:
        session.execute("x = torch.ones(2) * rank\nfrom math import sqrt")
        assert session.execute("x = dtlab.collectives.all_reduce(comm, x)\nx").values == [
            "tensor([3., 3.])"] * 3
        session.execute("def double(x):\n    return 2 * sqrt(x * x)")
        assert session.execute("double(rank + size)").values == ["6.0", "8.0", "10.0"]
        assert session.execute("_ + 1").values == ["7.0", "9.0", "11.0"]  # the last one shown
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == [f"[rank {rank}] tensor([3., 3.])" for rank in range(3)]


def test_run_in_a_session_has_a_trace_of_its_own() -> None:
    def shift(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        into = torch.empty_like(x)
        comm.sendrecv(x, 1 - comm.rank, into, 1 - comm.rank)
        return into + comm.rank

    with Session(ranks=2) as session:
        pids = session.run(lambda comm: os.getpid()).values
        for n in range(1, 4):
            result = session.run(shift, torch.ones(n))
            assert result.values[1].tolist() == [2.0] * n
            assert result.trace.sent_bytes() == 8 * n
            assert all(0 <= m.sent_s <= m.end_s <= result.elapsed_s + 1 for m in
                       result.trace.transfers)
        assert session.run(lambda comm: os.getpid()).values == pids


def test_prints_and_the_last_expression_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(ranks=2) as session:
        result = session.execute("print('on', rank)\nif rank:\n    print('more')\nNone")
        assert result.output == ["on 0\n", "on 1\nmore\n"]
        session.execute("rank * 10")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] on 0", "[rank 1] on 1", "[rank 1] more", "[rank 0] 0", "[rank 1] 10"]


def test_after_an_error_that_all_survive_variables_remain() -> None:
    with Session(ranks=2) as session:
        session.execute("x = rank + 10")
        with pytest.raises(RankFailed, match="ZeroDivisionError") as caught:
            session.execute("y = 1\nx / (1 - rank)")
        assert 'File "<ranks ' in caught.value.traceback_text
        assert "line 2" in caught.value.traceback_text
        assert "x / (1 - rank)" in caught.value.traceback_text
        assert not getattr(caught.value, "__notes__", [])
        assert session.execute("x + y").values == ["11", "12"]
        # messages that went astray in the failed call are not received by this one
        with pytest.raises(RankFailed):
            session.execute("w = comm.isend(torch.ones(3), 1 - rank)\nraise ValueError")
        source = ("z = torch.zeros(1)\n"
                  "comm.sendrecv(torch.full((1,), float(rank)), 1 - rank, z, 1 - rank)\n"
                  "z.item()")
        assert session.execute(source).values == ["1.0", "0.0"]


@pytest.mark.parametrize(("source", "error"), [
    ("import os; os._exit(1) if rank else comm.recv(torch.zeros(1), 1)", RankDied),
    ("comm.recv(torch.zeros(1), 1 - rank)", Deadlock),
    ("1 / rank; comm.recv(torch.zeros(1), 0)", RankFailed),
])
def test_when_ranks_had_to_be_stopped_it_says_so_and_starts_afresh(
    source: str, error: type[Exception]
) -> None:
    with Session(ranks=2) as session:
        session.execute("x = 1")
        with pytest.raises(error) as caught:
            session.execute(source)
        assert "variables are gone" in caught.value.__notes__[0]
        assert not session.alive
        with pytest.raises(RankFailed, match="NameError"):
            session.execute("x")
        assert session.execute("rank").values == ["0", "1"]


def test_a_deadlock_is_still_seen_after_an_error() -> None:
    with Session(ranks=2, timeout=60) as session:
        with pytest.raises(RankFailed):
            session.execute("dtlab.collectives.barrier(comm)\nraise ValueError")
        with pytest.raises(Deadlock):
            session.execute("comm.recv(torch.zeros(1), 1 - rank)")


def test_split_communicators_last_too() -> None:
    with Session(ranks=2) as session:
        session.execute("half = comm.split(0, key=-rank)")
        assert session.execute("half.rank").values == ["1", "0"]
        with pytest.raises(RankFailed):
            session.execute("raise ValueError")
        source = "again = comm.split(0)\nx = torch.ones(1) * rank\n" \
                 "dtlab.collectives.all_reduce(again, x).item()"
        assert session.execute(source).values == ["1.0", "1.0"]


def test_a_syntax_error_is_the_callers() -> None:
    with Session(ranks=2) as session:
        for source in ("x +", "return 3", "break", "%time 1"):
            with pytest.raises(SyntaxError) as caught:
                session.execute(source)
            assert ("IPython's" in str(getattr(caught.value, "__notes__", ""))) == ("%" in source)
            assert session.execute("rank").values == ["0", "1"]


def test_a_closed_session_stays_closed() -> None:
    session = Session(ranks=1)
    assert "not started" in repr(session)
    session.execute("1")
    assert "alive" in repr(session)
    session.close()
    session.close()
    assert "closed" in repr(session)
    with pytest.raises(ConfigError, match="closed"):
        session.execute("1")


def test_calls_of_several_threads_take_turns_and_closing_ends_one_in_words() -> None:
    with Session(ranks=2, echo=False) as session:
        found: list[Any] = []

        def often(number: int) -> None:
            for _ in range(10):
                source = f"import time; time.sleep({number} * 1e-3); {number}"
                found.append(session.execute(source).values == [str(number)] * 2)

        threads = [threading.Thread(target=often, args=(n,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found == [True] * 30
        threading.Timer(0.3, session.close).start()
        with pytest.raises(ConfigError, match="another thread has closed"):
            session.execute("time.sleep(30)")


def test_a_session_that_nobody_holds_ends() -> None:
    session = Session(ranks=2, echo=False)
    pids = [int(pid) for pid in session.execute("import os; os.getpid()").values]
    del session
    wait_until_gone(pids)


@pytest.mark.parametrize(("owner", "moment"), [
    (RankGroup, "_all_answered"), (RankHandle, "close")])
def test_after_ctrl_c_while_an_error_is_handled_the_next_call_starts_afresh(
    owner: type, moment: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = getattr(owner, moment)

    def interrupted(self: Any) -> None:
        context.undo()
        original(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_monitor, "GRACE_S", 0.1)
    files = []
    with Session(ranks=2) as session:
        for _ in range(3):
            with monkeypatch.context() as context:
                context.setattr(owner, moment, interrupted)
                with pytest.raises(KeyboardInterrupt) as caught:
                    session.execute("comm.recv_object(0)", "cell")  # rank 0's own; rank 1 waits
            assert not session.alive
            assert "the next call starts new ones" in caught.value.__notes__[0]
            assert session.run(lambda comm: comm.rank).values == [0, 1]
            del caught
            gc.collect()  # what the error still knew
            files.append(len(os.listdir("/dev/fd")))
    assert files[1:] == files[:-1]


def run_cells(*sources: str) -> list[str]:
    """The text that each cell of a new notebook leaves below itself."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=100).execute()
    return ["".join(map(text_of, cell.outputs)) for cell in notebook.cells]


def text_of(output: Any) -> str:
    if output.output_type == "error":
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
    return output.get("text") or output["data"]["text/plain"]


@pytest.mark.slow
def test_a_notebook_runs_cells_on_ranks() -> None:
    texts = run_cells(
        "import dtlab\n%load_ext dtlab",
        "def f(comm):\n    print('hi')\n    return comm.rank\ndtlab.run(f, ranks=2).values",
        "def f(comm):\n    return 'redefined'\ndtlab.run(f, ranks=2).values",
        "def g(comm):\n    if comm.rank == 1:\n        raise ValueError('here')\n"
        "dtlab.run(g, ranks=2)",
        "def h(comm):\n    comm.recv_object(1 - comm.rank)\ndtlab.run(h, ranks=2)",
        "%%ranks 2\nx = torch.ones(2) * rank\nx",
        "%%ranks\nx + 1",
        "%%ranks\ny = 2\n1 / (1 - rank)",
        "%%ranks\ny + rank",
        "%%ranks 3 --timeout 30\nsize",
        "%%ranks --new\n'y' in globals()",
        "%%ranks many\nsize",
        "%%ranks\nx +",
    )
    assert texts[1] == "[rank 0] hi\n[rank 1] hi\n[0, 1]"
    assert texts[2] == "['redefined', 'redefined']"
    assert 'File "Cell In[4]", line 3, in g' in texts[3]
    assert "raise ValueError('here')" in texts[3]
    assert "launcher.py" not in texts[3]  # none of our own frames
    assert "Cell In[5]:2 in h" in texts[4]
    assert texts[5] == "[rank 0] tensor([0., 0.])\n[rank 1] tensor([1., 1.])\n"
    assert texts[6] == "[rank 0] tensor([1., 1.])\n[rank 1] tensor([2., 2.])\n"
    assert "1 / (1 - rank)\nZeroDivisionError" in texts[7]
    assert texts[8] == "[rank 0] 2\n[rank 1] 3\n"
    assert texts[9] == "[rank 0] 3\n[rank 1] 3\n[rank 2] 3\n"
    assert texts[10] == "[rank 0] False\n[rank 1] False\n[rank 2] False\n"
    assert "use %%ranks [how many]" in texts[11]
    assert "SyntaxError" in texts[12]


def test_a_call_that_does_not_fit_is_refused_and_the_ranks_stay() -> None:
    with Session(ranks=1) as session:
        session.execute("x = 1")
        with pytest.raises(ConfigError, match="too many positional arguments"):
            session.run(lambda comm: None, 5)
        assert session.execute("x").values == ["1"]
