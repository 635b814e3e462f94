"""What chapter 10 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision
from torch.nn.modules import _functions

from dtlab import Comm, cost, simulate
from dtlab.models import MLP, digits
from dtlab.parallel import DataParallel, sync_batch_norm
from dtlab.parallel.data import STRATEGIES
from dtlab.plots import step_of
from dtlab.topology import uniform
from dtlab.widgets.overlap import LAYER_BYTES, LAYERS, OverlapExplorer, train_step
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("10")
printed = CHAPTER.printed
ALPHA, BETA, FORWARD_S = 10e-6, 1e-10, 100e-6
BACKWARD_S = 2 * FORWARD_S * LAYERS


def exposed_ms(strategy: str, buckets: int) -> float:
    network = uniform(4, ALPHA, 1 / BETA)
    return 1e3 * step_of(simulate(train_step, strategy, buckets, network=network).trace).exposed_s


def test_the_guess(prose: str) -> None:
    reduce_s = [k * cost.time_s("all_reduce", "ring", 4, LAYERS * LAYER_BYTES // k, ALPHA, BETA)
                for k in (1, 12)]
    assert "takes 1.9 ms, so backward and reduction take 4.3 ms" in prose
    assert reduce_s[0] == pytest.approx(1.9e-3, abs=5e-5)
    assert BACKWARD_S + reduce_s[0] == pytest.approx(4.3e-3, abs=5e-5)
    assert "twelve all-reduces take 2.6 ms rather than 1.9 ms" in prose
    assert reduce_s[1] == pytest.approx(2.6e-3, abs=5e-5)
    assert 1e3 * BACKWARD_S + exposed_ms("overlap", 12) == pytest.approx(2.8, abs=0.05)
    assert "A 5.0 ms: twelve reductions take longer than one" in prose
    assert BACKWARD_S + reduce_s[1] == pytest.approx(5.0e-3, abs=5e-5)
    assert "B 3.7 ms: half of the communication hides" in prose
    assert BACKWARD_S + reduce_s[1] / 2 == pytest.approx(3.7e-3, abs=5e-5)


def test_how_much_of_a_step_the_first_and_the_last_version_wait(prose: str) -> None:
    assert "the first version that one writes waits for two fifths of every step" in prose
    assert "and the last one, with the same bytes, for an eighth" in prose
    rows = {name: (float(step), float(exposed)) for name, step, exposed in re.findall(
        r"^(\w+) +a step ([\d.]+) ms, of which ([\d.]+) ms", printed("step-table"), re.M)}
    assert list(rows) == list(STRATEGIES)
    share = {name: exposed / step for name, (step, exposed) in rows.items()}
    assert share["parameter"] == pytest.approx(2 / 5, abs=0.025)
    assert share["overlap"] == pytest.approx(1 / 8, abs=0.01)
    network = uniform(4, ALPHA, 1 / BETA)
    sent = [sum(m.nbytes for m in simulate(train_step, strategy, 4, network=network)
                .trace.transfers if "all_reduce" in m.label) for strategy in STRATEGIES]
    assert max(sent) == pytest.approx(min(sent), rel=1e-4)


def test_only_buckets_that_leave_early_gain(prose: str) -> None:
    assert "Buckets alone gain nothing. Buckets that leave early do: the same bytes" in prose
    by = {name: float(exposed) for name, exposed in re.findall(
        r"^(\w+) +a step [\d.]+ ms, of which ([\d.]+) ms", printed("step-table"), re.M)}
    assert by["parameter"] > by["bucket"] > by["flat"] > by["overlap"]
    assert "a quarter of the waiting" in prose
    assert by["overlap"] / by["flat"] == pytest.approx(0.25, abs=0.04)


def test_up_to_six_buckets_only_the_last_is_exposed(prose: str) -> None:
    assert "with up to 6 buckets, a reduction is quicker than the gradients" in prose
    assert "buckets win at most the time of backward" in prose
    slow = [cost.exposed_s(BACKWARD_S, LAYERS * LAYER_BYTES, k, 4, ALPHA, 1e-9)
            for k in range(1, 13)]
    assert 0 < slow[0] - min(slow) < BACKWARD_S
    assert "With 12, latencies make c longer than b (217 and 200 µs)" in prose
    c = {k: cost.time_s("all_reduce", "ring", 4, LAYERS * LAYER_BYTES // k, ALPHA, BETA)
         for k in range(1, 13)}
    assert all(c[k] < BACKWARD_S / k for k in range(1, 7))
    assert c[12] == pytest.approx(217e-6, abs=5e-7)
    assert pytest.approx(200e-6) == BACKWARD_S / 12


def test_the_best_number_of_buckets_is_one_that_equal_layers_can_make(prose: str) -> None:
    assert "The formula itself is least at 9 buckets, 0.294 ms; but twelve equal layers" in prose
    form = {k: 1e3 * cost.exposed_s(BACKWARD_S, LAYERS * LAYER_BYTES, k, 4, ALPHA, BETA)
            for k in range(1, 13)}
    assert min(form, key=form.__getitem__) == 9
    assert form[9] == pytest.approx(0.294, abs=5e-4)
    best = cost.best_buckets(BACKWARD_S, LAYERS * LAYER_BYTES, LAYERS, 4, ALPHA, BETA)
    simulated = {k: exposed_ms("overlap", k) for k in (1, 2, 3, 4, 6, 12)}
    assert best == min(simulated, key=simulated.__getitem__) == 6
    assert simulated[6] == pytest.approx(0.375, abs=5e-4)
    assert "the best that 12 layers can make: 6 buckets, 0.375 ms" in printed("formula-table")
    assert "best with overlap: 6 buckets" in OverlapExplorer().static().alt


def test_what_the_explorer_answers(prose: str) -> None:
    def exposed(strategy: str, buckets: int = 4, ranks: int = 4, bandwidth: float = 1e9) -> float:
        network = uniform(ranks, ALPHA, bandwidth)
        trace = simulate(train_step, strategy, buckets, network=network).trace
        return 1e3 * step_of(trace).exposed_s

    assert "Less: a ring of two sends n bytes a rank, a ring of four one and a half times" in prose
    for strategy in STRATEGIES:
        assert exposed(strategy, ranks=2, bandwidth=1e10) < exposed(strategy, bandwidth=1e10)
    assert "At 1 GB/s, with 4 ranks and 4 buckets, it saves 1.6 of 18.9 ms" in prose
    assert exposed("flat") == pytest.approx(18.9, abs=0.05)
    assert exposed("flat") - exposed("overlap") == pytest.approx(1.6, abs=0.05)
    options = [Bps for _, Bps in OverlapExplorer().speed.options]
    assert 1e9 in options
    for bandwidth in options:
        one, flat = (exposed(strategy, 1, 4, bandwidth) for strategy in ("overlap", "flat"))
        assert one == pytest.approx(flat)


def test_batch_norm_sees_its_own_shard(prose: str) -> None:
    """The chapter's case, and that the gap grows as shards shrink."""
    assert "30 samples a rank are 9 % off, 15 are 14 %" in prose
    assert printed("norm") == (
        "2 ranks, BatchNorm1d: 9% off\n2 ranks, sync_batch_norm: equal, within 1e-12\n"
        "4 ranks, BatchNorm1d: 14% off\n4 ranks, sync_batch_norm: equal, within 1e-12\n")
    assert hasattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm")
    assert "two small all-reduces a layer each way" in prose
    assert [norm_calls(backward) for backward in (False, True)] == [2, 4]
    assert "with an all-gather forward and an all-reduce backward" in prose
    forward, backward = inspect.getsource(_functions.SyncBatchNorm).split("def backward")
    assert "all_gather" in forward
    assert "all_reduce" not in forward
    assert "all_reduce" in backward
    assert "all_gather" not in backward

    def means(ranks: int, batch: int) -> float:
        """How far a layer's mean over a shard is from that over the batch, in the mean square."""
        x = torch.cat([digits(torch.float64)[0].batch(step, batch).x for step in range(9)])
        whole = x.view(9, 1, batch, -1).mean(2)
        return float((x.view(9, ranks, batch // ranks, -1).mean(2) - whole).square().mean())

    assert means(2, 60) < means(4, 60) < means(12, 60)


def norm_calls(backward: bool) -> float:
    """How many all-reduces a rank makes in a pass through one synchronized layer."""
    def one_pass(comm: Comm) -> None:
        norm = sync_batch_norm(torch.nn.BatchNorm1d(3), comm)
        out = norm(torch.randn(5, 3, requires_grad=True)).square().sum()
        if backward:
            out.backward()

    trace = simulate(one_pass, network=uniform(2, ALPHA, 1 / BETA)).trace
    assert all(m.label.startswith("all_reduce") for m in trace.transfers)
    return trace.messages(0) / 2  # a ring of two: a rank sends two messages each


def test_layer_norm_needs_nothing_and_dropout_a_seed_for_each_rank(prose: str) -> None:
    assert "Layer norm and RMS norm look at one sample at a time, and need nothing" in prose
    x = torch.randn(6, 8)
    for norm in (torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)):
        assert torch.allclose(norm(x)[2:4], norm(x[2:4]))
    assert "else all ranks drop the same units at the same places of their shards" in prose
    dropped = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        dropped.append(torch.nn.Dropout(0.5)(torch.ones(4, 8)) == 0)
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], dropped[2])


def test_averaging_weights_is_averaging_gradients_where_the_step_is_linear(prose: str) -> None:
    found = dict(re.findall(r"^(\w+ +on \d ranks): (.*)$", printed("averaging"), re.M))
    for name in ("SGD     ", "momentum"):
        assert {found[f"{name} on {p} ranks"] for p in (2, 4)} == {"equal, within 1e-12"}
    assert "Adam misses a fifth on two ranks and more than a third on four" in prose
    assert found["Adam     on 2 ranks"] == "20% off"
    assert found["Adam     on 4 ranks"] == "36% off"
    assert "noisier, its square larger, its steps shorter" in prose
    way = {what: adam_way(what) for what in ("gradients", "weights")}
    assert way["weights"] < 0.95 * way["gradients"]


def adam_way(what: str) -> float:
    """How far the weights of the chapter's MLP are from the start after 20 steps on 4 ranks."""
    replicas = [MLP((64, 32, 10)).module(dtype=torch.float64) for _ in range(4)]
    optimizers = [torch.optim.Adam(replica.parameters(), lr=0.01) for replica in replicas]
    begin = torch.cat([p.detach().flatten() for p in replicas[0].parameters()])
    for step in range(20):
        batch = digits(torch.float64)[0].batch(step, 60)
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            x, y = batch.shard(rank, 4)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(replica(x), y).backward()
        together = list(zip(*(replica.parameters() for replica in replicas), strict=True))
        if what == "gradients":
            for copies in together:
                mean = torch.stack([p.grad for p in copies]).mean(0)
                for p in copies:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for copies in together:
                mean = torch.stack(list(copies)).mean(0)
                for p in copies:
                    p.copy_(mean)
    end = torch.cat([p.detach().flatten() for p in replicas[0].parameters()])
    return float((end - begin).norm())


def test_the_digits_of_bfloat16(prose: str) -> None:
    assert "8 significant bits (7 of them stored), which are 2.4 decimal digits" in prose
    assert torch.finfo(torch.bfloat16).eps == 2**-7
    assert math.log10(2**8) == pytest.approx(2.4, abs=0.01)
    most, of_float32 = (torch.finfo(dtype).max for dtype in (torch.bfloat16, torch.float32))
    assert most == pytest.approx(of_float32, rel=0.01)


def test_a_reduction_in_bfloat16_does_no_harm_on_the_digits(prose: str) -> None:
    assert "(one model, one seed, 8 ranks, 100 steps) it does no harm: the accuracy stays" in prose
    assert "within two percentage points" in prose
    accuracy = [simulate(train_in, dtype, network=uniform(8, ALPHA, 1 / BETA)).values[0]
                for dtype in (torch.float32, torch.bfloat16)]
    assert accuracy[0] > 0.9
    assert abs(accuracy[0] - accuracy[1]) < 0.02


def train_in(comm: Comm, dtype: torch.dtype) -> float:
    module = MLP((64, 32, 10)).module()
    model = DataParallel(module, comm, "flat", reduce_dtype=dtype, algorithm="ring")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(100):
        x, y = digits()[0].batch(step, 64).shard(comm.rank, comm.size)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    test = digits()[1]
    return float((model(test.x).argmax(-1) == test.y).double().mean())


def test_reduce_dtype_alone_leaves_the_computing_in_float32(prose: str) -> None:
    assert "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in prose
    assert "`reduce_dtype` alone leaves the parameters, and so the computing, in float32" in prose
    assert MixedPrecision(reduce_dtype=torch.float32).param_dtype is None


def test_what_is_the_answer_of_an_exercise_is_not_printed() -> None:
    shown = "".join(out.get("data", {}).get("text/markdown", "")
                    for cell in CHAPTER.cells.values() for out in cell.get("outputs", []))
    assert "def finish_reduction" in shown
    assert "def buckets_of" not in shown


def test_a_small_step_is_lost_in_bfloat16(prose: str) -> None:
    assert "a weight of 1.0 and a step of 0.001 would add up to 1.0 in bfloat16" in prose
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert (one + 0.001).item() == 1.0


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "so the best k moves up until the latencies" in prose
    assert "with more ranks that term grows, and k moves down" in prose

    def best(ranks: int, beta: float) -> int:
        return cost.best_buckets(BACKWARD_S, LAYERS * LAYER_BYTES, 48, ranks, ALPHA, beta)

    assert best(4, BETA / 2) > best(4, BETA)
    assert best(8, BETA) < best(4, BETA)
