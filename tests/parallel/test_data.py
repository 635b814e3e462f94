"""Data parallelism where it is not simple: accumulation, unused and shared parameters, buffers,
mixed precision, uneven batches, and what must be refused. And beside torch's own."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dtlab
from dtlab.models import CNN, MLP, digits
from dtlab.parallel import BatchSampler, DataParallel, clip_grad_norm_, zero
from dtlab.parallel.data import STRATEGIES
from tests.parallel.training import batch_of, loss_of, on, refused, shard_of


def simulated(fn: Any, *args: Any, ranks: int = 3) -> list[Any]:
    return on("simulator", fn, *args, ranks=ranks).values


def mlp() -> nn.Module:
    return MLP((64, 16, 10)).module(dtype=torch.float64)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_equal(a: list[Any], b: list[Any], tolerance: float = 1e-14) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_are_averaged_once(strategy: str) -> None:
    def accumulate(comm: dtlab.Comm) -> list[Any]:
        model = DataParallel(mlp(), comm, strategy, bucket_bytes=2000, algorithm="ring")
        before = comm.now()
        with model.no_sync():
            for step in (0, 1):
                loss_of(model, shard_of(batch_of("mlp", step, size=12), comm.rank, 3)).backward()
        assert comm.now() == before  # nothing was sent
        loss_of(model, shard_of(batch_of("mlp", 2, size=12), comm.rank, 3)).backward()
        return gradients(model.module)

    one = mlp()
    for step in range(3):
        loss_of(one, batch_of("mlp", step, size=12)).backward()
    for values in simulated(accumulate):
        assert_equal(values, gradients(one))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_lie_in_memory_as_their_parameters_do(reduce_dtype: Any) -> None:
    """Fused optimizers go through both as they lie, and ask no questions."""
    def train(comm: dtlab.Comm | None) -> list[Any]:
        torch.manual_seed(0)
        module: Any = nn.Conv2d(3, 4, 2, dtype=torch.float32).to(memory_format=torch.channels_last)
        module.turned = nn.Parameter(torch.randn(5, 4).t())
        model = module if comm is None else DataParallel(module, comm, reduce_dtype=reduce_dtype)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            y = model(torch.ones(2, 3, 4, 4)).mean((0, 2, 3)) @ module.turned
            (y * torch.arange(5)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    expected = train(None)
    for values in simulated(train, ranks=2):
        assert_equal(values, expected, tolerance=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_a_step_is_one_all_reduce(strategy: str) -> None:
    def step(comm: dtlab.Comm, steps: int) -> None:
        model = DataParallel(mlp(), comm, strategy, bucket_bytes=2000, algorithm="ring")
        for number in range(steps):
            loss_of(model, shard_of(batch_of("mlp", number, size=12), comm.rank, 3)).backward()

    network = dtlab.topology.uniform(3, 1e-6, 1e9)
    once, twice = (dtlab.simulate(step, n, network=network).trace for n in (1, 2))
    nbytes = sum(p.numel() + 1 for p in mlp().parameters()) * 8  # and a count for each
    assert twice.sent_bytes() - once.sent_bytes() == 2 * 2 * nbytes  # 2(p−1)/p·n, p ranks
    groups = {"parameter": 4, "flat": 1, "bucket": 1, "overlap": 1}[strategy]
    assert twice.messages() - once.messages() == 3 * 4 * groups


class Branches(nn.Module):
    """Uses the layers that it is told to; the first one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, 0.1 * (number + 1))
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return self.layers[0](x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("used", [((0,), (0,), (0,)), ((0, 1), (0,), (0, 2)), ((1,), (1,), (1,))],
                         ids=["some nowhere", "some on one rank", "one nowhere"])
def test_parameters_that_some_or_all_ranks_do_not_use(strategy: str, used: Any) -> None:
    x = torch.ones(2, 3, dtype=torch.float64)

    def step(comm: dtlab.Comm) -> list[Any]:
        model = DataParallel(Branches(), comm, strategy, bucket_bytes=80)
        model(x, used[comm.rank]).sum().backward()
        return gradients(model.module)

    one = Branches()
    sum(one(x, layers).sum() for layers in used).div(3).backward()
    for values in simulated(step):
        assert_equal(values, gradients(one))


def test_a_parameter_unused_in_the_last_micro_batch_is_averaged() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)

    def step(comm: dtlab.Comm) -> list[Any]:
        model = DataParallel(Branches(), comm, bucket_bytes=80)
        with model.no_sync():
            model(x * comm.rank, (1,)).sum().backward()
        model(x, (0,)).sum().backward()
        return gradients(model.module)

    one = Branches()
    sum(one(x * rank, (1,)).sum() + one(x, (0,)).sum() for rank in range(3)).div(3).backward()
    for values in simulated(step):
        assert_equal(values, gradients(one))


def test_a_wrapped_model_lasts_as_long_as_its_module() -> None:
    def train(wrap: Any) -> Any:
        module = nn.Linear(2, 2)
        model = wrap(module)[0]
        model(torch.ones(1, 2)).sum().backward()
        return weakref.ref(module)

    def rank(comm: dtlab.Comm) -> tuple[list[Any], float]:
        models = [train(lambda module, stage=stage: zero(module, comm, stage))
                  for stage in (1, 2, 3)]
        models.append(train(lambda module: [DataParallel(module, comm)]))
        module = nn.Linear(1, 1)
        DataParallel(module, comm)  # whose return value is dropped: it reduces all the same
        gc.collect()
        module(torch.full((1, 1), float(comm.rank))).sum().backward()
        assert module.weight.grad is not None
        return [model() for model in models], module.weight.grad.item()

    assert simulated(rank) == [([None] * 4, 1.0)] * 3


def test_buffers_are_rank_0s_before_each_forward() -> None:
    def step(comm: dtlab.Comm) -> list[torch.Tensor]:
        model = DataParallel(CNN(batch_norm=True), comm)
        data = digits()[0]
        for number in range(2):
            batch = data.batch(number, 12).shard(comm.rank, comm.size)
            cross_entropy(model(batch.x), batch.y).backward()
        return [b.clone() for b in model.module.buffers()]

    values = simulated(step)
    one = CNN(batch_norm=True)
    for number in range(2):
        one(digits()[0].batch(number, 12).shard(0, 3).x)
    assert_equal(list(values[0]), list(one.buffers()), 1e-6)


class Cache(nn.Linear):
    """Its buffer is as long as the longest batch, as those of rotary positions are."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("cos", torch.ones(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cos = torch.ones(max(len(self.cos), len(x)), 1)
        return super().forward(x) * self.cos[: len(x)]


def test_a_buffer_that_has_another_shape_on_each_rank_is_named() -> None:
    def step(comm: dtlab.Comm) -> None:
        model = DataParallel(nn.Sequential(Cache()), comm)
        for _ in range(2):
            model(torch.ones(2 + comm.rank, 3)).sum().backward()

    with pytest.raises(dtlab.ShapeMismatch, match=r"in the buffer 0.cos: broadcast\(float32 .2, 1"):
        simulated(step)


def test_uneven_numbers_of_batches() -> None:
    def train(comm: dtlab.Comm) -> list[Any]:
        model = DataParallel(mlp(), comm)
        batches = iter([batch_of("mlp", n, size=4) for n in range(comm.rank)])  # 0, 1 and 2
        seen = []
        while True:
            shard = next(batches, None)
            loss = None if shard is None else loss_of(model, shard)
            total = model.backward(loss, 0 if shard is None else len(shard[-1]))
            if not total:
                return [seen, gradients(model.module)]
            seen.append(total)
            for p in model.module.parameters():
                p.grad = None

    for seen, last in simulated(train):
        assert seen == [8, 4]
        assert last == [None] * 4


def test_gradients_travel_in_the_dtype_that_was_asked_for() -> None:
    def step(comm: dtlab.Comm, dtype: torch.dtype) -> list[Any]:
        model = DataParallel(mlp().float(), comm, reduce_dtype=dtype, algorithm="ring")
        loss_of(model, shard_of(batch_of("mlp", 0, torch.float32, 12), comm.rank, 3)).backward()
        return gradients(model.module)

    exact, rounded = simulated(step, torch.float32)[0], simulated(step, torch.bfloat16)[0]
    assert all(g.dtype == torch.float32 for g in rounded)
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(exact, rounded,
                                                                           strict=True))
    assert 1e-4 < error < 3 * 2**-8  # three roundings to 8 bits


def loader(comm: dtlab.Comm, length: int, batch: int = 7) -> tuple[BatchSampler, DataLoader[Any]]:
    """Of the samples 0 … length−1."""
    sampler = BatchSampler(length, batch, comm, seed=1)
    return sampler, DataLoader(torch.arange(length), batch_sampler=sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [5, 7, 12, 13, 15, 100])
def test_the_sampler_neither_drops_nor_repeats(length: int, ranks: int) -> None:
    def batches(comm: dtlab.Comm) -> list[list[int]]:
        sampler, data = loader(comm, length)
        sampler.set_epoch(3)
        assert len(list(sampler)) == len(sampler)
        return [batch.tolist() for batch in data]

    values = simulated(batches, ranks=ranks)
    for number, at_once in enumerate(zip(*values, strict=True), 1):
        sizes = [len(batch) for batch in at_once]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        assert sum(sizes) == 7 or (number == len(values[0]) and sum(sizes) < 7 + ranks)
    assert sorted(i for rank in values for batch in rank for i in batch) == list(range(length))


def test_the_sampler_shuffles_each_epoch_otherwise() -> None:
    def batches(comm: dtlab.Comm) -> list[list[int]]:
        sampler, _ = loader(comm, 20)
        seen = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            seen.append([*itertools.chain(*sampler)])
        return seen

    for first, second, third in simulated(batches, ranks=2):
        assert first == third != second


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (5, 1)])
@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_an_epoch_goes_on_after_what_was_seen_on_any_number_of_ranks(
        before: int, after: int, done: int) -> None:
    def begin(comm: dtlab.Comm) -> tuple[list[int], dict[str, int], dict[str, int]]:
        sampler, data = loader(comm, 22)
        sampler.set_epoch(4)
        seen = [int(i) for batch in itertools.islice(data, done) for i in batch]
        ahead = BatchSampler(22, 7, comm, seed=1)
        ahead.set_epoch(4)
        list(ahead)  # as a DataLoader's workers
        return seen, sampler.state_dict(), ahead.state_dict(done)

    def go_on(comm: dtlab.Comm, state: dict[str, int]) -> tuple[list[int], list[int]]:
        sampler, data = loader(comm, 22, batch=5)
        sampler.load_state_dict(state)
        assert sampler.epoch == 4
        sampler.set_epoch(4)
        assert len(data) == len(list(data))
        sampler.load_state_dict(state)
        rest, again = ([int(i) for batch in data for i in batch] for _ in range(2))
        return rest, again

    begun = simulated(begin, ranks=before)
    states = [state for _, *states in begun for state in states]
    assert states == [states[0]] * (2 * before)
    rest = simulated(go_on, states[0], ranks=after)
    both = [*(seen for seen, *_ in begun), *(seen for seen, _ in rest)]
    assert sorted(itertools.chain(*both)) == list(range(22))
    assert sorted(itertools.chain(*(again for _, again in rest))) == list(range(22))


# ---- what must be refused ------------------------------------------------------------------------


def frozen_on_one_rank(comm: dtlab.Comm) -> None:
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(comm.rank != 1)
    DataParallel(module, comm)


def differentiated_twice(comm: dtlab.Comm) -> None:
    DataParallel(nn.Linear(3, 3), comm)(torch.ones(1, 3)).sum().backward(create_graph=True)


def gradients_left(comm: dtlab.Comm) -> None:
    model = DataParallel(nn.Linear(3, 3), comm)
    for _ in range(2):
        model.backward(model(torch.ones(1, 3)).sum(), 1)


def another_state(comm: dtlab.Comm, name: str, value: Any) -> None:
    sampler = BatchSampler(10, 4, comm)
    sampler.load_state_dict(sampler.state_dict() | {name: value})


@pytest.mark.parametrize(("mistake", "sentence"), [
    (lambda comm: DataParallel(nn.Linear(3, 3 + (comm.rank == 2)), comm),
     r"'weight' has shape \(3, 3\).* rank 0, but has shape \(4, 3\).* on rank 2"),
    (frozen_on_one_rank, r"'weight'.*trained on rank 0, but.*frozen on rank 1"),
    (differentiated_twice, r"create_graph"),
    (gradients_left, r"call zero_grad\(\)"),
    (lambda comm: BatchSampler(10, 2, comm), r"a batch of 2 is too small for 3 ranks"),
    (lambda comm: BatchSampler(10, 3, comm, seed=comm.rank), "every rank gives equal arguments"),
    (lambda comm: BatchSampler(2, 3, comm), "2 samples can't be shared by 3 ranks.* at most 2"),
    (lambda comm: another_state(comm, "seen", 8), "2 samples can't be shared by 3 ranks"),
    (lambda comm: another_state(comm, "length", 9), "the state is of 9 samples, but there are 10"),
    (lambda comm: BatchSampler(10, 4, comm).state_dict(1),
     "batches of this epoch so far must be 0 or less, not 1"),
    (lambda comm: DataParallel(nn.Linear(1, 1), comm, "fast"), "no strategy 'fast'"),
    (lambda comm: DataParallel(nn.Linear(1, 1), comm, bucket_bytes=0), "above 0, not 0"),
    (lambda comm: DataParallel(nn.Linear(1, 1), comm, algorithm="pairwise"),
     "no all_reduce algorithm 'pairwise'"),
    *((lambda comm, kind=kind, dtype=dtype: DataParallel(nn.Linear(1, 1, dtype=kind), comm,
                                                         reduce_dtype=dtype),
       rf"such as torch\.\w+ for {kind}, not '?{dtype}") for kind, dtype in (
        (torch.float32, torch.int32), (torch.float32, "bf16"), (torch.float32, torch.complex64),
        (torch.complex64, torch.bfloat16), (torch.float32, torch.float8_e4m3fn))),
    *((lambda comm, name=name, value=value: another_state(comm, name, value),
       f"the state's {name} must be") for name, value in (
        ("seen", -1), ("seen", 11), ("seen", "a"), ("epoch", -1), ("seed", "x"), ("shuffle", 3))),
    (lambda comm: DataParallel(nn.Linear, comm), r"need a torch\.nn\.Module"),
    (lambda comm: clip_grad_norm_(nn.Linear(1, 1), 1), "takes what DataParallel, zero or hybrid"),
])
def test_a_mistake_is_one_sentence(mistake: Any, sentence: str) -> None:
    assert re.search(sentence, refused(mistake, ranks=3))


# ---- beside torch --------------------------------------------------------------------------------


def test_torchs_own_wrappers_run_beside_ours() -> None:
    """Within a run, over the same ranks; what is of both kinds is refused in a sentence."""
    def train(comm: dtlab.Comm) -> float:
        torch.manual_seed(0)
        first, second = (nn.Linear(3, 3).double() for _ in range(2))
        one = nn.Sequential(copy.deepcopy(first), nn.Tanh(), copy.deepcopy(second))
        ours = dtlab.from_process_group(torch.distributed.new_group([0, 1]))
        theirs = nn.parallel.DistributedDataParallel(first)
        x = torch.arange(24, dtype=torch.float64).view(2, 4, 3).sin()
        model = DataParallel(second, ours)
        model(theirs(x[comm.rank]).tanh()).square().mean().backward()
        one(x).square().mean().backward()
        mesh = init_device_mesh("cpu", (2,))
        for module, says in ((theirs, "in one of both"), (distribute_module(nn.Linear(3, 3), mesh),
                                                          "a DTensor, whose to_local")):
            with pytest.raises(dtlab.errors.DtlabError, match=says):
                DataParallel(module, comm)
        both = nn.parallel.DistributedDataParallel(DataParallel(nn.Linear(3, 3), comm))
        with pytest.raises(dtlab.errors.ConfigError, match="in one of both"):  # were zeros
            both(torch.ones(3))
        return max(float((p.grad - q.grad).abs().max()) for p, q in zip(  # type: ignore[operator]
            [*first.parameters(), *second.parameters()], one.parameters(), strict=True))

    assert max(dtlab.run(train, ranks=2).values) < 1e-15


def one_batch_too_few(comm: dtlab.Comm) -> None:
    model = DataParallel(nn.Linear(1, 1), comm)
    for _ in range(2 - comm.rank):
        model(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize("start", [
    lambda fn: dtlab.run(fn, ranks=2, timeout=30),
    lambda fn: dtlab.simulate(fn, network=dtlab.topology.uniform(2, 1e-6, 1e9)),
])
def test_a_deadlock_in_backward_is_at_the_line_that_called_it(start: Any) -> None:
    with pytest.raises(dtlab.Deadlock) as caught:
        start(one_batch_too_few)
    lines = {wait.line for wait in caught.value.waiting if wait.doing != "returned"}
    assert lines
    assert all(re.fullmatch(r"test_data\.py:\d+ in one_batch_too_few", x) for x in lines)
