"""What ranks that share one Python process nevertheless have to themselves."""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import enum
import functools
import gc
import importlib
import io
import logging
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import dtlab
from dtlab import Comm, ConfigError, RankFailed, run, simulate, topology
from dtlab.collectives import ALGORITHMS, all_reduce, barrier
from dtlab.ranks.pickling import Pickler


def values(fn: Any, *args: Any, p: int = 3, **options: Any) -> list[Any]:
    network = topology.uniform(p, 1e-6, 1e9)
    return simulate(fn, *args, network=network, echo=False, **options).values


MODEL = torch.nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def test_an_optimizer_still_steps_the_model_beside_it() -> None:
    before = MODEL.bias.item()

    def step() -> None:
        OPTIMIZER.zero_grad()
        MODEL(torch.ones(1, 2)).sum().backward()
        OPTIMIZER.step()

    def fn(comm: Comm) -> float:
        for _ in range(comm.rank):
            step()
        return MODEL.bias.item()

    assert values(fn) == pytest.approx([before - 0.1 * rank for rank in range(3)], abs=1e-6)
    assert MODEL.bias.item() == before


def test_closures_defaults_partials_methods_and_objects() -> None:
    x = torch.zeros(1)

    def closure(comm: Comm) -> float:
        return x.add_(comm.rank).item()

    def default(comm: Comm, y: torch.Tensor = x, *, z: torch.Tensor = x) -> float:
        return y.add_(comm.rank).item() + z.item()

    class Trainer:
        def __init__(self) -> None:
            self.state = torch.zeros(1)

        def train(self, comm: Comm) -> float:
            return self.state.add_(comm.rank).item()

        __call__ = train

    trainer = Trainer()
    assert values(closure) == [0.0, 1.0, 2.0]
    assert values(default) == [0.0, 2.0, 4.0]  # y and z are one tensor, as they were
    assert values(functools.partial(lambda y, comm: y.add_(comm.rank).item(), x)) == [0, 1, 2]
    assert values(trainer.train) == values(trainer) == [0.0, 1.0, 2.0]
    assert x.item() == trainer.state.item() == 0.0


def test_functions_that_call_each_other() -> None:
    x = torch.zeros(1)

    def even(n: int) -> float:
        return x.add_(1).item() if n == 0 else odd(n - 1)

    def odd(n: int) -> float:
        return even(n - 1)

    assert values(lambda comm: even(4)) == [1.0, 1.0, 1.0]
    assert x.item() == 0.0


def test_a_variable_that_is_assigned_later_is_no_obstacle() -> None:
    def fn(comm: Comm) -> int:
        return comm.rank if comm.rank < 9 else later

    assert values(fn) == [0, 1, 2]
    if False:
        later = 1


def test_arguments_are_copied_whatever_they_are() -> None:
    leaf = torch.ones(1, requires_grad=True)
    middle = leaf * 2  # torch refuses to copy it deeply

    def fn(comm: Comm, items: list[Any], x: torch.Tensor, leaf: torch.Tensor) -> Any:
        items.append(comm.rank)
        with torch.no_grad():
            x += comm.rank
        return items[1:], x.item(), leaf.requires_grad, items[0] is math

    given: list[Any] = [math]  # which copy.deepcopy refuses
    assert values(fn, given, middle, leaf) == [
        ([rank], 2.0 + rank, True, True) for rank in range(3)]
    assert given == [math]
    assert middle.item() == 2.0


LIST: list[int] = []
DICT: dict[str, Any] = {"inner": [torch.zeros(1)], "same": LIST}
ARRAY, WEIGHT = np.zeros(2), torch.zeros(2)


class Counter:
    count = 0


COUNTER = Counter()


def note(number: int) -> None:
    LIST.append(number)
    WEIGHT.add_(number)


HANDLERS = {"note": note}


def test_globals_of_any_kind_are_the_ranks_own_as_on_processes() -> None:
    closed = {"seen": {9}}

    def fn(comm: Comm) -> Any:
        def array() -> list[float]:
            ARRAY[0] += comm.rank
            return ARRAY.tolist()

        comm.split(0)  # every rank has begun
        note(comm.rank)
        HANDLERS["note"](10)
        DICT["inner"][0] += comm.rank
        COUNTER.count += 1
        closed["seen"].add(comm.rank)
        return (LIST, DICT["same"] is LIST, DICT["inner"][0].item(), array(),
                WEIGHT.tolist(), COUNTER.count, sorted(closed["seen"]))

    expected = [([rank, 10], True, rank, [rank, 0], [rank + 10] * 2, 1, sorted({rank, 9}))
                for rank in range(3)]
    assert values(fn) == expected
    assert dtlab.run(fn, ranks=3).values == expected
    assert (LIST, DICT, closed) == ([], {"inner": [0], "same": []}, {"seen": {9}})
    assert ARRAY.tolist() == WEIGHT.tolist() == [0.0, 0.0]
    assert COUNTER.count == 0


def test_what_can_be_neither_copied_nor_pickled_is_refused_by_name() -> None:
    lock = threading.Lock()
    for fn, where in ((lambda comm, lock: lock.locked(), "argument 1"),
                      (lambda comm: lock.locked(), "variable `lock` used by `<lambda>`")):
        args = [lock] if where == "argument 1" else []
        with pytest.raises(dtlab.ConfigError, match=f"^{where} can't be sent to the ranks: lock .* "
                                                     "create it inside the function instead$"):
            values(fn, *args)


def test_copies_that_no_machine_could_hold_are_refused() -> None:
    huge = torch.empty(1).expand(1)  # one element is enough: see below
    assert values(lambda comm, x: x.numel(), huge) == [1, 1, 1]
    with pytest.raises(dtlab.ConfigError, match="meta"):
        simulate(lambda comm, x: None, torch.empty(1 << 20),
                 network=topology.uniform(10_000_000, 0, 1))
    assert values(lambda comm, x: x.numel(), torch.empty(1 << 40, device="meta")) == [1 << 40] * 3


def neighbours(comm: Comm) -> None:
    x = torch.ones(1)
    comm.sendrecv(x, (comm.rank + 1) % comm.size, torch.ones(1), (comm.rank - 1) % comm.size)


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_the_default_dtype_belongs_to_the_rank_and_the_caller_keeps_his(strands: str) -> None:
    def fn(comm: Comm) -> tuple[torch.dtype, torch.dtype]:
        if comm.rank == 1:
            torch.set_default_dtype(torch.float64)
        for algorithm in ALGORITHMS["barrier"]:
            barrier(comm, algorithm)
        return torch.ones(1).dtype, comm.begin(lambda _: torch.ones(1)).wait().dtype

    result = simulate(fn, network=topology.uniform(3, 1e-6, 1e9), strands=strands)
    assert result.values == [2 * (torch.float32,), 2 * (torch.float64,), 2 * (torch.float32,)]
    assert torch.get_default_dtype() == torch.float32
    assert run(fn, ranks=3).values == result.values


def test_the_caller_keeps_his_default_device() -> None:
    def fn(comm: Comm) -> str:
        torch.set_default_device("meta")
        return torch.ones(1).device.type

    assert values(fn) == ["meta"] * 3
    assert torch.ones(1).device.type == "cpu"


def test_modes_of_torch_belong_to_the_rank_and_the_caller_keeps_his() -> None:
    def fn(comm: Comm) -> list[Any]:
        seen: list[Any] = []
        contexts = [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad]
        for turn in range(6):
            with contexts[(turn + comm.rank) % 3]():
                neighbours(comm)
                seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
                             torch.is_grad_enabled()))
                neighbours(comm)
            neighbours(comm)
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
        return seen

    inside = [(True, False, False), (False, True, True), (False, False, False)]
    with torch.no_grad():
        got = values(fn)
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    for rank, seen in enumerate(got):
        assert seen == [inside[(turn + rank) % 3] for turn in range(6)]
    with torch.inference_mode():
        assert values(lambda comm: torch.is_grad_enabled()) == [True] * 3
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_what_a_process_has_once_is_a_ranks_own_and_the_caller_keeps_his(strands: str) -> None:
    def fn(comm: Comm) -> list[Any]:
        if comm.rank == 2:
            sys.stdout = sys.stderr = io.StringIO()
        logger = logging.getLogger("dtlab.test")
        logger.setLevel(10 + comm.rank)
        logging.basicConfig(format=f"rank {comm.rank}: %(message)s")
        os.environ["DTLAB_TEST"] = f"{comm.rank}"
        show = print
        builtins.print = lambda *text: show(*text) if comm.rank == 1 else None
        if comm.rank == 1:
            warnings.simplefilter("error")
        torch.set_printoptions(precision=2)
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True)
        neighbours(comm)
        logging.warning("logged")
        builtins.print("printed")
        try:
            warnings.warn("warned", stacklevel=1)
        except UserWarning as error:
            return [logger.level, os.environ["DTLAB_TEST"], str(error)]
        return [logger.level, os.environ["DTLAB_TEST"], ""]

    def of_caller() -> list[Any]:
        return [logging.getLogger().handlers[:], logging.getLogger("dtlab.test").level, print,
                sys.stdout, sys.stderr, warnings.filters, {**os.environ},
                torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
                str(torch.tensor(1 / 3))]

    before = of_caller()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = simulate(fn, network=topology.uniform(3, 1e-6, 1e9), strands=strands)
    assert of_caller() == before
    assert result.values == [[10, "0", ""], [11, "1", "warned"], [12, "2", ""]]
    assert result.output == ["rank 0: logged\n", "rank 1: logged\nprinted\n", ""]


def test_a_rank_inside_autocast_leaves_the_casts_of_others_alone() -> None:
    def fn(comm: Comm) -> float:
        weight = torch.ones(2, 2, requires_grad=True)
        if comm.rank == 0:
            with torch.autocast("cpu"), comm.compute("", seconds=1):
                pass  # meanwhile the others step
        for _ in range(3):
            with torch.autocast("cpu"):
                (weight @ weight).sum().backward()
            with torch.no_grad():
                weight.add_(weight.grad)
        return weight.sum().item()

    assert values(fn) == run(fn, ranks=3).values


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu"), lambda: torch.device("meta")])
def test_ranks_begin_outside_of_the_modes_that_the_caller_is_in(mode: Callable[[], Any]) -> None:
    def fn(comm: Comm) -> float:
        weight = torch.ones(2, 2, requires_grad=True)
        for _ in range(3):
            with torch.autocast("cpu"):
                loss = (weight @ weight).sum()
            loss.backward()
            with torch.no_grad():
                weight.add_(weight.grad)
        return loss.item()

    expected = values(fn)
    with mode():
        assert values(fn) == expected
        with pytest.raises(ConfigError, match="strands=\"thread\""):
            values(fn, strands="greenlet")


def test_ranks_may_communicate_inside_vmap_and_compile_but_not_profile() -> None:
    def fn(comm: Comm) -> list[Any]:
        def double(x: torch.Tensor) -> torch.Tensor:
            neighbours(comm)
            return x * 2

        @torch.compile(backend="eager")
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return x * (comm.rank + 1)

        return [torch.vmap(double)(torch.ones(2)).tolist(), compiled(torch.ones(1)).tolist()]

    def profiles(comm: Comm) -> None:
        with torch.profiler.profile():
            neighbours(comm)

    assert values(fn) == [[[2, 2], [1 + rank]] for rank in range(3)]
    with pytest.raises(RankFailed, match=r"use dtlab\.run"):
        values(profiles)


@pytest.mark.parametrize("strands", ["greenlet", "thread"])
def test_cached_parametrizations_are_a_ranks_own(strands: str) -> None:
    def fn(comm: Comm) -> list[float]:
        layer = torch.nn.utils.parametrize.register_parametrization(
            torch.nn.Linear(1, 1, bias=False), "weight", torch.nn.ReLU())
        seen = []
        for step in range(3):
            layer.parametrizations.weight.original.data.fill_(1 + comm.rank + step)
            with torch.nn.utils.parametrize.cached(), comm.compute("", seconds=1 + comm.rank / 3):
                seen.append(layer.weight.item())
        return seen

    assert values(fn, strands=strands) == [[1 + r, 2 + r, 3 + r] for r in range(3)]


def test_received_data_leaves_no_history() -> None:
    def fn(comm: Comm) -> bool:
        x = torch.ones(2, requires_grad=True)
        all_reduce(comm, x)
        box = torch.zeros(2, requires_grad=True)
        comm.sendrecv(x * 2, (comm.rank + 1) % 3, box, (comm.rank - 1) % 3)
        return x.is_leaf and box.is_leaf and box.tolist() == [6.0, 6.0]

    assert values(fn) == [True] * 3
    assert values(fn, strands="thread") == [True] * 3


def test_a_simulation_inside_a_rank_prints_through_it() -> None:
    def inside(comm: Comm) -> int:
        print("inner", comm.rank)
        return comm.rank

    def fn(comm: Comm) -> None:
        result = simulate(inside, network=topology.uniform(2, 0, 1))
        print("outer", comm.rank, result.values)

    result = simulate(fn, network=topology.uniform(2, 0, 1), echo=False)
    assert result.output == [
        f"[rank 0] inner 0\n[rank 1] inner 1\nouter {rank} [0, 1]\n" for rank in range(2)]


COUNT = 0


def count() -> None:
    global COUNT
    COUNT += 1


def counted() -> int:
    return COUNT


def test_two_functions_that_share_a_variable_still_do() -> None:
    def make() -> tuple[Any, Any]:
        number = 0

        def add() -> None:
            nonlocal number
            number += 1

        return add, lambda: number

    add, number = make()

    def fn(comm: Comm) -> tuple[int, int]:
        for _ in range(comm.rank + 1):
            count()
            add()
        return counted(), number()

    assert values(fn) == [(1, 1), (2, 2), (3, 3)]
    assert (COUNT, number()) == (0, 0)
    assert values(lambda comm, one, other: (one(), other())[1], add, number) == [1, 1, 1]


class AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclasses.dataclass(frozen=True)
class Unset:
    a: int = 1
    b: int = dataclasses.field(init=False)


CONFIG, TREE, UNSET = AttrDict(lr=0.1), ast.parse("1"), Unset()


def test_odd_globals_are_copied_or_refused_in_one_sentence() -> None:
    assert values(lambda comm: (CONFIG.lr, len(TREE.body), UNSET.a)) == [(0.1, 1, 1)] * 3


def test_a_functions_attributes_are_its_ranks_own() -> None:
    def counting(comm: Comm) -> int:
        counting.calls += 1  # type: ignore[attr-defined]
        return counting.calls  # type: ignore[attr-defined]

    counting.calls = 0  # type: ignore[attr-defined]
    assert values(counting) == [1, 1, 1]
    assert counting.calls == 0  # type: ignore[attr-defined]


def test_functions_inside_objects_have_their_ranks_variables() -> None:
    holder = SimpleNamespace(note=note, factory=collections.defaultdict(lambda: LIST))
    model = torch.nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: LIST.append(7))
    append = LIST.append

    def fn(comm: Comm) -> list[int]:
        comm.split(0)
        holder.note(comm.rank)
        holder.factory["x"].append(5)
        model(torch.ones(1))
        append(9)
        return LIST

    assert values(fn) == [[rank, 5, 7, 9] for rank in range(3)]
    assert LIST == []


def test_a_cache_is_its_ranks_own() -> None:
    @functools.cache
    def square(n: int) -> int:
        LIST.append(n)
        return n * n

    assert values(lambda comm: (square(2), square(2), LIST)) == [(4, 4, [2])] * 3
    assert (square.cache_info().currsize, LIST) == (0, [])


def test_a_persons_own_modules_are_their_ranks_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "notes.py").write_text(
        "import math\nseen, count = [], 0\n"
        "def note(rank):\n    global count\n    count += 1\n    seen.append(rank)\n")
    monkeypatch.syspath_prepend(tmp_path)
    helpers: Any = importlib.import_module("helpers")
    notes: Any = importlib.import_module("helpers.notes")

    def fn(comm: Comm) -> Any:
        helpers.notes.note(comm.rank)
        notes.note(comm.rank)
        notes.math.tau = 6.28 if comm.rank < 0 else notes.math.tau
        notes.count += 1
        return helpers.notes.seen, notes.count

    assert values(fn) == [([rank, rank], 3) for rank in range(3)]
    assert (notes.seen, notes.count) == ([], 0)


class Registry:
    names: ClassVar[list[str]] = []
    total = 0

    def note(self) -> None:
        LIST.append(1)


class Special(Registry):
    pass


def test_what_a_class_holds_and_its_methods_use_is_the_ranks_own_as_on_processes() -> None:
    def fn(comm: Comm) -> Any:
        Registry.total += comm.rank
        Special.names.append("a")
        Registry.extra = comm.rank  # type: ignore[attr-defined]
        Special().note()
        comm.split(0)  # every rank has done so
        return Registry.total, Special.names, Special.extra, LIST  # type: ignore[attr-defined]

    expected = [(rank, ["a"], rank, [1]) for rank in range(3)]
    assert values(fn) == dtlab.run(fn, ranks=3).values == expected
    assert (Registry.total, Registry.names, LIST) == (0, [], [])
    assert not hasattr(Registry, "extra")


class Colour(enum.Enum):
    RED = 1


class TooRed(Exception):
    pass


def test_what_comes_back_is_of_the_callers_classes() -> None:
    note = Registry.note

    def fn(comm: Comm, colour: Colour) -> Any:
        class Inner(Registry):
            pass

        box: list[Any] = []
        comm.exchange(dtlab.Send((Special(), Inner()), (comm.rank + 1) % 3), dtlab.Recv(box))
        assert isinstance(box[0][0], Special)
        assert isinstance(box[0][1], Registry)
        assert colour is Colour.RED
        return box[0][0], colour, [Special], Inner()

    for special, colour, (cls,), inner in values(fn, Colour.RED):
        assert type(special) is cls is Special
        assert isinstance(inner, Registry)
        assert colour is Colour.RED
    assert Registry.note is note  # the class is as it was

    def failing(comm: Comm) -> None:
        raise TooRed

    with pytest.raises(dtlab.RankFailed) as failure:
        values(failing)
    assert isinstance(failure.value.__cause__, TooRed)


def test_variables_that_are_not_named_are_found_as_on_processes() -> None:
    def fn(comm: Comm) -> tuple[Any, int]:
        globals()["LIST"].append(comm.rank)
        return LIST, eval("len(LIST)")

    assert values(fn) == dtlab.run(fn, ranks=3).values == [([rank], 1) for rank in range(3)]
    assert LIST == []


@dataclasses.dataclass
class Model:
    weight: torch.Tensor
    groups: frozenset[int]


def test_a_list_of_models_sets_and_generators_in_a_closure() -> None:
    models = [Model(torch.zeros(2), frozenset({0, n})) for n in range(2)]
    kept: frozenset[Any] = frozenset({frozenset({1}), ("a", 2)})
    seen, table = {5}, {frozenset({1}): [0]}
    generator = torch.Generator().manual_seed(7)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7))

    def fn(comm: Comm) -> Any:
        drawn = torch.rand(2, generator=generator)
        models[0].weight += comm.rank
        seen.add(comm.rank)
        table[frozenset({1})].append(comm.rank)
        all_reduce(comm, models[1].weight.add_(1))
        return (drawn, models, kept, sorted(seen), table, 1 in models[1].groups)

    for rank, (drawn, got, same, numbers, found, there) in enumerate(values(fn)):
        assert torch.equal(drawn, expected)
        assert isinstance(got[0], Model)
        assert [model.weight.tolist() for model in got] == [[rank, rank], [3.0, 3.0]]
        assert (same, numbers, there) == (kept, sorted({5, rank}), True)
        assert found == {frozenset({1}): [0, rank]}
    assert models[0].weight.tolist() == [0.0, 0.0]
    assert (seen, table) == ({5}, {frozenset({1}): [0]})
    assert torch.equal(torch.rand(2, generator=generator), expected)


def test_large_arguments_are_the_ranks_own() -> None:
    big = torch.zeros(1 << 20)
    view = big[5:7]  # of the same memory

    def fn(comm: Comm, big: torch.Tensor, view: torch.Tensor) -> tuple[float, float]:
        view += comm.rank
        return big[5].item(), big.sum().item()

    assert values(fn, big, view) == [(rank, 2.0 * rank) for rank in range(3)]
    assert big.sum() == 0.0


def test_a_function_may_name_a_module_that_is_no_ordinary_one() -> None:
    def fn(comm: Comm) -> bool:
        return torch.classes is importlib.import_module("torch.classes")

    assert values(fn) == [True] * 3


def test_lists_nested_too_deeply_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(dtlab.ConfigError, match="excessively deep"):
        values(lambda comm: len(deep))


def test_a_cached_method_of_an_object_travels_with_the_object():
    """`cache(data.batch)` is found under the method's name nowhere, so it goes by value."""
    class Data:
        def batch(self, number: int) -> int:
            return 10 * number

    batch = functools.cache(Data().batch)
    assert values(lambda comm: batch(comm.rank)) == [0, 10, 20]


def test_what_was_pickled_is_in_no_circle_and_views_are_of_arrays() -> None:
    """Before 3.13, Python's garbage collector crashes on memoryviews of memoryviews."""
    pickler = Pickler()
    gone = weakref.ref(pickler)
    [view] = pickler.pickled([torch.ones(100_000), torch.ones(3)]).buffers
    assert isinstance(view.obj, np.ndarray)
    gc.disable()
    try:
        del pickler
        assert gone() is None
    finally:
        gc.enable()


def test_simulations_of_several_threads_take_turns() -> None:
    def draw(comm: Comm) -> float:
        print("drawn")
        return all_reduce(comm, torch.rand(1)).item()

    alone, found, before = simulate(draw, network=topology.uniform(3, 0, 1)), [], sys.stdout

    def often() -> None:
        for _ in range(20):
            found.append(simulate(draw, network=topology.uniform(3, 0, 1), echo=False))

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(often)
    assert sys.stdout is before
    assert [(r.values, r.output) for r in found] == [(alone.values, alone.output)] * 80
