"""Pipelines: schedules as data, their times, and an executor that equals one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.parallel import MemoryMeter
from dtlab.parallel.pipeline import (
    Pipeline,
    Schedule,
    cut,
    dualpipe_v,
    gpipe,
    gpt_layers,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from tests.parallel.training import on

Generate = Callable[..., Schedule]
GENERATORS: list[tuple[Generate, tuple[int, ...]]] = [
    (naive, ()), (gpipe, ()), (one_f_one_b, ()), (zb_h1, ()), (zb_h2, ()), (zb_v, ()),
    (dualpipe_v, ()), (interleaved, (2,)), (interleaved, (3,)), (looped_bfs, (2,))]
numbers = st.integers(1, 9)


# ---- schedules -----------------------------------------------------------------------------------


@given(st.sampled_from(GENERATORS), numbers, st.integers(1, 20))
def test_every_schedule_runs_and_reads_as_it_prints(
        made: tuple[Generate, tuple[int, ...]], p: int, m: int) -> None:
    generate, options = made
    schedule = generate(p, m, *options).check()
    assert (schedule.ranks, schedule.micro_batches) == (p, m)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_a_rank_without_actions_stays_in_csv() -> None:
    schedule = Schedule.of([[], *gpipe(2, 2).rows, []])
    assert Schedule.from_csv("\n" + schedule.to_csv() + "  ") == schedule


def torchs(kind: Any, p: int, m: int) -> str:
    """What torch's own schedule of two stages a rank writes as CSV, without its process groups."""
    schedule = object.__new__(kind)
    rounds = max(1, m // p)
    vars(schedule).update(n_local_stages=2, pp_group_size=p, _num_stages=2 * p, num_stages=2 * p,
                          _n_microbatches=m, number_of_rounds=rounds,
                          microbatches_per_round=m // rounds)
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(p)]
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)


@pytest.mark.parametrize(("name", "generate"), [
    ("ScheduleInterleaved1F1B", interleaved), ("ScheduleZBVZeroBubble", zb_v),
    ("ScheduleDualPipeV", dualpipe_v), ("ScheduleInterleavedZeroBubble", None)])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_torchs_schedules_can_be_read_and_are_ours(
        name: str, generate: Generate | None, p: int) -> None:
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.schedules import _Action as TorchAction

    for m in (m for m in range(2 * p - 1, 5 * p) if m % (m // p) == 0):  # others torch refuses
        theirs = Schedule.from_csv(torchs(getattr(schedules, name), p, m)).check()
        assert generate is None or generate(p, m) == theirs
        for line in theirs.to_csv().splitlines():
            assert all(str(TorchAction.from_str(cell)) == cell for cell in line.split(","))


def test_what_torchs_runtime_dumps_is_read(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    ours = interleaved(2, 4).to_csv()
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    order = {rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
             for rank, line in enumerate(ours.splitlines())}
    sharded = {rank: schedules._add_reduce_grad(schedules._add_unshard_reshard(row), 4)
               for rank, row in order.items()}
    runtime.pipeline_order_with_comms = schedules._add_send_recv(sharded, lambda s: s % 2, 4)
    runtime._dump_csv(str(tmp_path / "dump.csv"), format="compute_comms")
    text = (tmp_path / "dump.csv").read_text()
    assert all(word in text for word in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    assert Schedule.from_csv(text) == interleaved(2, 4)


@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_interleaved_is_no_longer_than_torchs(p: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    for m in range(1, 5 * p):
        ours = interleaved(p, m).time().elapsed
        if m % max(1, m // p) == 0:  # others torch refuses
            theirs = Schedule.from_csv(torchs(ScheduleInterleaved1F1B, p, m)).time().elapsed
            assert ours <= theirs + 1e-9


@given(numbers, numbers, st.integers(1, 3), st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0, 1))
def test_bubbles_are_the_formulas(
        p: int, m: int, v: int, F: float, W: float, more: float) -> None:
    B = 2 * W + more
    near = pytest.approx
    for generate in (gpipe, one_f_one_b):
        timing = generate(p, m).time(F, B, W)
        assert timing.bubble == near((p - 1) * (F + B))
        assert timing.bubble_fraction == near((p - 1) / (m + p - 1))
        assert timing.bubble_ratio == near((p - 1) / m)
    assert naive(p, m).time(F, B, W).elapsed == near(m * p * (F + B))
    assert interleaved(p, p * m, v).time(F, B, W).bubble == near((p - 1) * (F + B) / v)
    assert looped_bfs(p, p * m, v).time(F, B, W).bubble == near((p - 1) * (F + B) / v)
    if F >= W:
        m += 2 * p
        assert zb_h1(p, m).time(F, B, W).bubble == near((p - 1) * (F + B - 2 * W))
        assert zb_h2(p, m).time(F, B, W).bubble == near((p - 1) * (F + B - 3 * W), abs=1e-9)
    assert zb_v(p, m + 2 * p).time(W, 2 * W, W).bubble == near(0, abs=1e-9)


@given(numbers, st.integers(1, 20), st.integers(2, 4))
def test_micro_batches_in_flight_are_the_formulas(p: int, m: int, v: int) -> None:
    first = [min(m, p - i) for i in range(p)]
    assert gpipe(p, m).time().in_flight == [m] * p
    assert one_f_one_b(p, m).time().in_flight == first
    assert zb_h1(p, m).time().in_flight == first
    assert max(zb_h1(p, m).time().held) == max(first)
    assert zb_h2(p, m).time().in_flight == [min(m, 2 * (p - i) - 1) for i in range(p)]
    m += 2 * p
    assert zb_v(p, m).time().in_flight == [p] * p
    many = interleaved(p, p * m, v).time().in_flight[0]
    assert many == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_a_message_is_late_by_its_latency() -> None:
    timing = gpipe(3, 1).time(F=1, B=2, comm=0.5)
    assert timing.elapsed == 3 * 3 + 4 * 0.5
    assert [row[0][1] for row in timing.spans] == [0, 1.5, 3]
    inside = zb_v(2, 4).time(F=2, B=4, W=2, comm=10)  # stages 1 and 2 lie on one rank
    assert min(begin for action, begin, _ in inside.spans[1] if action.stage == 2) == 12


@pytest.mark.parametrize(("grid", "says", "marked"), [
    ("0F0 0B0 0B0", "0B0 is done twice", "»0B0«"),
    ("0F0 0F1 0B0", "0B1, or 0I1 and 0W1, are missing", ""),
    ("0F0 0I0", "0W0 is missing", ""),
    ("0B0", "0F0 is missing", ""),
    ("0F0 0B0 0W0", "0W0 is one too many", "»0W0«"),
    ("0F0 0W0 0I0", "0W0 waits for 0I0, which comes after it", "»0W0«"),
    ("0F0 0B0\n1F0 1B0\n0F1 0B1 1F1 1B1", "stage 0 is on rank 2, too", "»0F0«"),
    ("1F0 1B0 0F0 0B0", "1F0 waits for 0F0, which comes after it on rank 0", "»1F0«"),
    ("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", "deadlock: 0B0 waits for 1B0, which never runs", "»0B0«"),
])
def test_a_wrong_schedule_prints_its_grid_with_the_cell_marked(
        grid: str, says: str, marked: str) -> None:
    schedule = Schedule.parse(grid)
    for use in (schedule.check, schedule.time):
        with pytest.raises(dtlab.ConfigError, match=re.escape(says)) as caught:
            use()
        _, *lines = str(caught.value).splitlines()
        assert len(lines) == len(grid.splitlines())
        assert marked in "\n".join(lines)


@pytest.mark.parametrize(("text", "says"), [
    ("", "the text is empty"), ("0F0 hello", "line 1, word 2: 'hello' is no action"),
    ("0F0\n0X0", "line 2, word 1"), (None, "takes text, not None")])
def test_text_that_is_no_schedule_says_so(text: Any, says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        Schedule.parse(text)
    with pytest.raises(dtlab.ConfigError):
        Schedule.from_csv(text)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: gpipe(0, 3), "p, the ranks, must be a whole number"),
    (lambda: zb_v(2, 1.5), "m, the micro-batches,"),
    (lambda: interleaved(2, 2, 0), "v, the chunks,"),
    (Schedule.of([[]]).check, "the schedule has no actions"),
    (lambda: gpipe(2, 2).time(F=-1), "time: F must be 0 seconds or more"),
    (lambda: gpipe(2, 2).time(B=1, W=2), "less than W=2"),
    (lambda: gpipe(2, 2).time(comm=float("nan")), "comm must be"),
    (lambda: cut([nn.Linear(1, 1)] * 3, 4), "3 layers can't make 4 stages"),
    (lambda: cut([nn.Linear(1, 1)] * 3, [1, 1]), "don't make up 3 layers"),
    (lambda: cut([nn.Linear(1, 1)] * 3, [3, 0]), "don't make up 3 layers"),
])
def test_bad_numbers_say_so(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        call()


# ---- the executor --------------------------------------------------------------------------------

CONFIG = GPTConfig(layers=6, hidden=16, heads=2, context=8, dropout=0.1)
Gradients = dict[str, Tensor]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache
def one_device(size: int) -> tuple[float, Gradients]:
    gpt = GPT(CONFIG, dtype=torch.float64)
    tokens, targets = text_batch(0, size, 8)
    loss = loss_fn(gpt(tokens, torch.arange(size)), targets)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in gpt.named_parameters()
                                  if p.grad is not None}


def piped(comm: dtlab.Comm, schedule: Schedule, size: int, recompute: bool = False,
          sizes: list[int] | None = None, steps: int = 1) -> tuple[float, Gradients]:
    gpt = GPT(CONFIG, dtype=torch.float64)
    stages = cut(gpt_layers(gpt), sizes or schedule.stages)
    mine = [stages[number] for number in schedule.stages_of(comm.rank)]
    own = {p for stage in mine for p in stage.parameters()}
    tied = {"embedding": gpt.tokens.weight} if gpt.tokens.weight in own else {}
    pipeline = Pipeline(mine, schedule, comm, recompute=recompute, tied=tied)
    tokens, targets = text_batch(0, size, 8)
    for _ in range(steps):
        gpt.zero_grad()
        loss = pipeline.step(tokens, targets, loss_fn, torch.arange(size))
    return float(loss), {n: p.grad for n, p in gpt.named_parameters()
                         if p in own and p.grad is not None}


def assert_equal(values: list[tuple[float, Gradients]], size: int) -> None:
    loss, gradients = one_device(size)
    seen = set()
    for found, mine in values:
        assert found == pytest.approx(loss, abs=1e-12)
        for name, gradient in mine.items():
            assert float((gradient - gradients[name]).abs().max()) < 1e-10, name
        seen |= mine.keys()
    assert seen == gradients.keys()


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "simulator"])
def test_gradients_are_those_of_one_device(backend: str, p: int) -> None:
    """With fewer micro-batches than ranks, as many, and more; m = 3 recomputes activations."""
    for m in [2 * p - 1] if backend == "gloo" else [1, 3, 4, 7]:
        schedules = [generate(p, m, *options) for generate, options in
                     GENERATORS[:8] + GENERATORS[9:]]

        def each(comm: dtlab.Comm, schedules: Any = schedules, m: int = m) -> list[Any]:
            return [piped(comm, schedule, 2 * m, m == 3) for schedule in schedules]

        for values in zip(*on(backend, each, ranks=p).values, strict=True):
            assert_equal(list(values), 2 * m)


def test_uneven_stages_several_steps_and_a_schedule_of_ones_own() -> None:
    mine = Schedule.parse("0F0 0F1 0I0 0W0 0F2 0B1 0B2\n"
                          "1F0 1B0 1F1 1I1 1F2 1I2 1W2 1W1")
    for backend in ("gloo", "simulator"):
        values = on(backend, piped, mine, 6, False, [5, 3], 2, ranks=2).values
        assert_equal(values, 6)


@pytest.mark.parametrize(("generate", "options"), [(gpipe, ()), (one_f_one_b, ()), (zb_h1, ()),
                                                   (zb_v, ()), (interleaved, (2,))])
def test_simulated_time_is_the_schedules(generate: Generate, options: tuple[int, ...]) -> None:
    p, m = 3, 6
    schedule = generate(p, m, *options)
    share = len(schedule.stages_of(0))
    took = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def fn(comm: dtlab.Comm) -> float:
        stages = [nn.Linear(4, 4) for _ in schedule.stages_of(comm.rank)]
        pipeline = Pipeline(stages, schedule, comm,
                            seconds=lambda action: took[action.kind] / share)
        begun = comm.now()
        pipeline.step(torch.ones(m, 4), torch.ones(m, 4), nn.functional.mse_loss)
        return comm.now() - begun

    result = dtlab.simulate(fn, network=dtlab.topology.uniform(p, 1e-9, 1e15))
    expected = schedule.time()
    assert max(result.values) == pytest.approx(expected.elapsed, abs=1e-5)
    for rank, row in enumerate(expected.spans):
        spans = [e for e in result.trace.events if e.rank == rank and e.kind == "compute"]
        assert [e.label for e in spans] == [str(action) for action, *_ in row]
        assert [e.start_s for e in spans] == pytest.approx([begin for _, begin, _ in row], abs=1e-5)


@pytest.mark.parametrize("generate", [one_f_one_b, zb_h1, zb_h2])
def test_peak_memory_follows_the_micro_batches_held(generate: Generate) -> None:
    p, few, many = 3, 4, 9

    def peak(comm: dtlab.Comm, schedule: Schedule) -> float:
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
        stage = nn.Sequential(*layers)
        x = torch.ones(64 * schedule.micro_batches, 1).expand(-1, 32)
        with MemoryMeter(stage) as meter:
            Pipeline(stage, schedule, comm).step(x, x, nn.functional.mse_loss)
        return max(kinds["activations"] for _, kinds in meter.history) / (64 * 32 * 4)

    def peaks(generate: Generate, m: int) -> list[float]:
        return on("simulator", peak, generate(p, m), ranks=p).values

    each = [(b - a) / (many - few)
            for a, b in zip(peaks(gpipe, few), peaks(gpipe, many), strict=True)]
    held = [generate(p, m).time().held for m in (few, many)]
    found = [peaks(generate, m) for m in (few, many)]
    for rank in range(p):
        grown, more = found[1][rank] - found[0][rank], held[1][rank] - held[0][rank]
        # One that waits for W holds less: only the inputs of its matrix products.
        assert grown == pytest.approx(each[rank] * more, rel=0.5, abs=1.3)
        assert found[1][rank] == pytest.approx(each[rank] * held[1][rank], rel=0.3)


@pytest.mark.parametrize(("stages", "schedule", "x", "says"), [
    (1, gpipe(3, 2), torch.ones(4, 4), "the schedule is for 3 ranks, but there are 2"),
    (2, gpipe(2, 2), torch.ones(4, 4), r"the stages \[0\], but 2 modules came"),
    (1, gpipe(2, 3), torch.ones(4, 4), r"3 micro-batches need inputs .* not \(4, 4\)"),
    (1, Schedule.parse("0F0 0F0\n1F0 1B0"), torch.ones(4, 4), "done twice"),
])
def test_what_does_not_fit_says_so(stages: int, schedule: Schedule, x: Any, says: str) -> None:
    def fn(comm: dtlab.Comm) -> None:
        pipeline = Pipeline([nn.Linear(4, 4)] * stages, schedule, comm)
        pipeline.step(x, x, nn.functional.mse_loss)

    with pytest.raises(dtlab.ConfigError, match=says):
        on("simulator", fn, ranks=2)


def test_stages_that_do_not_fit_each_other_end_at_the_learners_line() -> None:
    def fn(comm: dtlab.Comm) -> None:
        Pipeline(nn.Linear(4, 4 + comm.rank * 2 + 1), gpipe(2, 2), comm).step(
            torch.ones(4, 4), torch.ones(4, 4), nn.functional.mse_loss)

    with pytest.raises(dtlab.RankFailed, match="shapes cannot be multiplied"):
        on("simulator", fn, ranks=2)


def test_ranks_with_different_schedules_are_told() -> None:
    def fn(comm: dtlab.Comm) -> None:
        Pipeline(nn.Linear(4, 4), (gpipe, one_f_one_b)[comm.rank](2, 2), comm)

    with pytest.raises(dtlab.ConfigError, match="different schedules"):
        on("simulator", fn, ranks=2)
