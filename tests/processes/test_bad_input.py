"""Arguments that make no sense are refused in words, before anything starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, RankFailed, Recv, Send, Session, run
from dtlab.processes.run import check_backend

lock = threading.Lock()
nested = {"deep": [1, {"lock": lock}]}


def nothing(comm: Comm) -> None:
    pass


@pytest.mark.parametrize(("name", "value", "words"), [
    *(("ranks", value, "ranks=") for value in (0, -1, 3.5, "4", None, True, [2])),
    ("ranks", 10_000, r"ranks=.*cores.*simulate"), ("device", "quantum", "device="),
    ("backend", "tpu", "backend="), ("backend", "mpi", "backend='mpi' is not available.*gloo"),
    ("device", 7.5, "device="), ("timeout", 0, "timeout="), ("timeout", -1, "timeout="),
    ("timeout", "soon", "timeout="), ("threads", 0, "threads="), ("threads", 1.5, "threads="),
])
def test_an_option_that_makes_no_sense_is_named(name: str, value: Any, words: str) -> None:
    for start in (partial(run, nothing), Session):
        with pytest.raises(ConfigError, match=words):
            start(**{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        run(nothing, device="cuda")


def test_nccl_wants_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_backend.__globals__["BACKENDS"], "nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"one GPU for each rank.*has 2"):
        check_backend("nccl", "cuda", 3)
    with pytest.raises(ConfigError, match="device='cuda'"):
        check_backend("nccl", "cpu", 2)
    check_backend("nccl", "cuda", 2)


def takes_anything(comm: Comm, *args: Any) -> None:
    pass


def cell(name: str) -> Callable[..., object]:
    """A function of a notebook's cell: it can only travel by value."""
    namespace: dict[str, Any] = {"__name__": "__main__", "lock": lock, "nested": nested}
    exec(
        "def uses_a_global(comm): return lock\n"
        "def uses_a_nested_global(comm): return nested\n"
        "def calls_one_that_does(comm): return uses_a_global(comm)\n"
        "def closure(lock):\n"
        "    mine = lock\n"
        "    return lambda comm: mine\n"
        "over_a_lock = closure(lock)\n"
        "def by_name(comm, *, mine=lock): return mine\n",
        namespace,
    )
    function: Callable[..., object] = namespace[name]
    return function


@pytest.mark.parametrize(("function", "args", "where"), [
    (cell("uses_a_global"), (), r"global `lock` used by `uses_a_global`"),
    (cell("uses_a_nested_global"), (),
     r"global `nested` used by `uses_a_nested_global`\['deep'\]\[1\]\["),
    (cell("calls_one_that_does"), (), r"global `lock` used by `uses_a_global`"),
    (cell("over_a_lock"), (), r"variable `mine` used by `<lambda>`"),
    (cell("by_name"), (), r"a default of `by_name`"),
    (takes_anything, (1, {"a": [lock]}), r"argument 2\['a'\]\[0\]"),
    (takes_anything, ((n for n in range(3)),), r"argument 1"),
])
def test_what_cannot_be_pickled_is_named(
    function: Callable[..., object], args: tuple[Any, ...], where: str
) -> None:
    with pytest.raises(ConfigError, match=where):
        run(function, *args)


def test_what_can_not_be_sent_back_is_named_without_a_line_of_ours() -> None:
    with pytest.raises(RankFailed, match="rank 0 returned a generator") as error:
        run(lambda comm: (n for n in range(comm.rank)), ranks=1)
    assert "File" not in str(error.value)


def test_a_communicator_that_a_function_uses_is_named_and_not_its_parts() -> None:
    def nested(comm: Comm) -> None:
        run(lambda inner: comm.rank, ranks=1)

    with pytest.raises(RankFailed, match="variable `comm` used by `<lambda>` can't be sent"):
        run(nested, ranks=1)


def locked(comm: Comm) -> bool:
    with lock:
        return True


def test_a_function_of_an_importable_module_may_use_what_cannot_be_pickled() -> None:
    """Then the ranks import its module, and have a lock of their own."""
    assert run(locked, ranks=2).values == [True, True]


@pytest.mark.parametrize(("call", "words"), [
    (lambda comm: comm.send(torch.zeros(1), comm.rank), "itself"),
    (lambda comm: comm.recv(torch.zeros(1), comm.rank), "itself"),
    (lambda comm: comm.send(torch.zeros(1), comm.size), "rank 2; the ranks here are 0 to 1"),
    (lambda comm: comm.send(torch.zeros(1), -1), "rank -1"),
    (lambda comm: comm.send(torch.zeros(1), "0"), "a rank is an int"),
    (lambda comm: comm.send(torch.zeros(1), None), "a rank is an int"),
    (lambda comm: comm.send(torch.zeros(1), []), "a rank is an int"),
    (lambda comm: comm.exchange(3.0), r"one or more of Send\(x, dst\) and Recv\(x, src\), not 3.0"),
    (lambda comm: comm.post("ab"), r"one or more of Send\(x, dst\)"),
    (lambda comm: comm.wait_any(3.0), "wait_any takes a list of what isend.* not 3.0"),
    (lambda comm: comm.wait_any([], "soon"), "the seconds of wait_any must be a number"),
    (lambda comm: comm.recv(5, 1 - comm.rank), "can't receive into a int"),
    (lambda comm: comm.send(torch.zeros(1, device="meta"), 1 - comm.rank),
     "a tensor on the device meta has no data"),
    (lambda comm: comm.send(torch.eye(3).to_sparse(), 1 - comm.rank), "make it dense"),
    (lambda comm: comm.send(torch.nested.nested_tensor([torch.zeros(2)]), 1 - comm.rank),
     "can't send or receive a nested tensor"),
])
def test_a_message_that_makes_no_sense_is_refused(
    call: Callable[[Comm], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(call, ranks=2)
    assert "test_bad_input.py" in str(caught.value)


def test_a_batch_with_one_bad_message_posts_none_of_it() -> None:
    def batch(comm: Comm) -> float:
        x, peer = torch.zeros(1), 1 - comm.rank
        with pytest.raises(ConfigError):
            comm.exchange(Send(torch.ones(1), peer), Recv(x, comm.rank))
        comm.sendrecv(torch.full((1,), 2.0), peer, x, peer)
        return x.item()

    assert run(batch, ranks=2).values == [2.0, 2.0]


@pytest.mark.parametrize("events", ["x", "-1", "2147483648", "9" * 20, "9" * 5000])
def test_an_environment_that_torch_can_not_read_is_named(
    monkeypatch: pytest.MonkeyPatch, events: str
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", events)
    with pytest.raises(ConfigError, match=r"TORCH_FR_BUFFER_SIZE='.*, where torch takes a whole"):
        run(lambda comm: comm.rank, ranks=2)


def repeats(comm: Comm, number: int = 0) -> None:
    repeats(comm, number + 1)


def there(comm: Comm, number: int = 0) -> None:
    back(comm, number + 1)


def back(comm: Comm, number: int) -> None:
    there(comm, number + 1)


@pytest.mark.parametrize(("endless", "says"), [
    (repeats, "Previous line repeated"), (there, r"\[\d+ more calls\]")])
def test_endless_recursion_has_a_short_traceback(
    endless: Callable[..., Any], says: str
) -> None:
    with pytest.raises(RankFailed, match=says) as caught:
        run(endless, ranks=1)
    assert str(caught.value).count("\n") < 100
