"""ZeRO: what each rank keeps, what it sends, and what it does in the cases that are not simple."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtlab
from dtlab import cost
from dtlab.models import GPT, MLP, GPTConfig
from dtlab.parallel import (
    DataParallel,
    MemoryMeter,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    zero,
)
from dtlab.parallel.sharded_optimizer import ELEMENTWISE
from tests.parallel.training import MODELS, batch_of, difference, loss_of, on, shard_of

STAGES = 1, 2, 3


def step_of(model: Any, optimizer: Any, kind: str, number: int, dtype: torch.dtype) -> None:
    shard = shard_of(batch_of(kind, number, dtype, 24), model.comm.rank, model.comm.size)
    if kind != "gpt":
        shard = tuple(x.to(dtype) if x.is_floating_point() else x for x in shard)
    model.backward(loss_of(model, shard), len(shard[-1]))
    optimizer.step()
    optimizer.zero_grad()


def deep() -> nn.Module:
    return MLP((64, 32, 32, 32, 10)).module()


@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_model_state_is_that_of_the_paper_to_the_padding(stage: int, ranks: int) -> None:
    def state(comm: dtlab.Comm) -> tuple[int, int]:
        if stage:
            model, optimizer = zero(deep(), comm, stage, torch.optim.Adam,
                                    param_dtype=torch.bfloat16)
            step_of(model, optimizer, "mlp", 0, torch.bfloat16)
            slack = sum(unit.padding for unit in model.units) * 16 + 4 * len(model.units)
            slack += 4 * sum(len(unit.pieces) for unit in model.units)  # Adam counts its steps
        else:
            model = DataParallel(deep(), comm)
            optimizer = torch.optim.Adam(model.parameters())
            step_of(model, optimizer, "mlp", 0, torch.float32)
            slack = 8 * len(list(model.parameters()))  # Adam counts its steps, buckets gradients
        dtype = next(model.parameters()).dtype
        with MemoryMeter(model, optimizer) as meter:
            shard = shard_of(batch_of("mlp", 1, dtype, 24), comm.rank, comm.size)
            loss_of(model, tuple(x.to(dtype) if x.is_floating_point() else x for x in shard)
                    ).backward()
            now = meter.now
        return sum(now[k] for k in ("parameters", "gradients", "optimizer state")), slack

    count = sum(p.numel() for p in deep().parameters())
    expected = {0: 16 * count, 1: 4 * count + 12 * count / ranks, 2: 2 * count + 14 * count / ranks,
                3: 16 * count / ranks}[stage]
    for nbytes, slack in on("simulator", state, ranks=ranks).values:
        assert expected - slack <= nbytes <= expected + slack


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stage_3_holds_two_layers_at_a_time(ranks: int) -> None:
    def peak(comm: dtlab.Comm) -> tuple[int, int, int]:
        model, optimizer = zero(MLP([64] * 11).module(), comm, 3)
        with MemoryMeter(model, optimizer) as meter:
            step_of(model, optimizer, "mlp", 0, torch.float32)
        layer = max(unit.numel for unit in model.units) * 4
        shards = sum(len(unit.shard) for unit in model.units) * 4
        return max(kinds["parameters"] for _, kinds in meter.history), shards, layer

    for most, shards, layer in on("simulator", peak, ranks=ranks).values:
        assert most <= shards + 2 * layer


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_traffic_is_that_of_the_paper(stage: int, model: str, ranks: int) -> None:
    def train(comm: dtlab.Comm, steps: int) -> int:
        wrapped, optimizer = zero(MODELS[model](torch.float64), comm, stage, algorithm="ring")
        for number in range(steps):
            shard = shard_of(batch_of(model, number, size=24), comm.rank, comm.size)
            loss_of(wrapped, shard).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(unit.numel for unit in wrapped.units)

    network = dtlab.topology.uniform(ranks, 1e-6, 1e9)
    once, twice = (dtlab.simulate(train, steps, network=network) for steps in (1, 2))
    count = once.values[0]
    for rank in range(ranks):
        sent = twice.trace.sent_bytes(rank) - once.trace.sent_bytes(rank)
        assert sent == {1: 2, 2: 2, 3: 3}[stage] * 8 * count * (ranks - 1) // ranks
        assert sent == pytest.approx(cost.zero_sent_bytes(count, ranks, stage, itemsize=8))


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_clipping_and_a_skipped_step(stage: int) -> None:
    def train(comm: dtlab.Comm | None) -> Any:
        module = MODELS["mlp"](torch.float64)
        model: Any = module
        optimizer: Any
        if comm is None:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        else:
            model, optimizer = zero(module, comm, stage, lr=0.01)
        norms = []
        for number in range(6):
            shard = batch_of("mlp", number, size=12)
            shard = shard if comm is None else shard_of(shard, comm.rank, comm.size)
            if number % 2 == 0 and comm is not None:
                with model.no_sync():
                    loss_of(model, shard).backward()
                continue
            loss_of(model, shard).backward()
            if number % 2 == 0:
                continue
            norms.append(float(clip_grad_norm_(model, 0.5) if comm else
                               nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
            if number != 3:  # that step is skipped
                optimizer.step()
            optimizer.zero_grad()
        return norms, full_state_dict(model) if comm else dict(module.named_parameters())

    norms, expected = train(None)
    for found, state in on("simulator", train, ranks=3).values:
        assert found == pytest.approx(norms, rel=1e-9)
        assert difference(state, {k: p.detach() for k, p in expected.items()}) < 1e-12


class Recomputed(nn.Module):
    """A GPT of which each block runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = MODELS["gpt"](torch.float64)

    def forward(self, tokens: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        x = self.gpt.tokens(tokens)
        for block in self.gpt.blocks:
            x = checkpoint(block, x, seeds, use_reentrant=False)
        return self.gpt.norm(x) @ self.gpt.tokens.weight.T


def test_stage_3_gathers_no_more_when_activations_are_recomputed() -> None:
    def train(comm: dtlab.Comm, steps: int) -> dict[str, torch.Tensor]:
        module = Recomputed()
        module.gpt.positions.requires_grad_(False)
        model, optimizer = zero(module, comm, 3, torch.optim.SGD, lr=0.1, algorithm="ring")
        for number in range(steps):
            loss_of(model, shard_of(batch_of("gpt", number, size=8), comm.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(model)

    network = dtlab.topology.uniform(2, 1e-6, 1e9)
    traces = [dtlab.simulate(train, steps, network=network).trace for steps in (1, 2)]
    count = sum(p.numel() for name, p in Recomputed().named_parameters() if "positions" not in name)
    assert traces[1].sent_bytes(0) - traces[0].sent_bytes(0) == 3 * 8 * count // 2
    one = Recomputed()
    one.gpt.positions.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(one, batch_of("gpt", number, size=8)).backward()
        optimizer.step()
    state = dtlab.simulate(train, 3, network=network).values[1]
    assert difference(state, {k: p.detach() for k, p in one.named_parameters()}) < 1e-12


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_leaves_nothing_gathered(stage: int) -> None:
    def evaluate(comm: dtlab.Comm) -> tuple[torch.Tensor, int]:
        model, _ = zero(MODELS["gpt"](torch.float64), comm, stage)
        before = sum(u.numel for u in model.units if u.whole is not None)
        model.eval()
        with torch.no_grad():
            logits = model(*batch_of("gpt", 0)[:-1])
        return logits, sum(u.numel for u in model.units if u.whole is not None) - before

    one = MODELS["gpt"](torch.float64).eval()
    for logits, more in on("simulator", evaluate, ranks=3).values:
        torch.testing.assert_close(logits, one(*batch_of("gpt", 0)[:-1]).detach())
        assert more == 0


class Backwards(nn.Module):
    """Runs the last of its layers first, and those of a list within a list one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second, third = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        self.layers = nn.ModuleList([nn.ModuleList([first, second]), third])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (first, second), third = self.layers
        y: torch.Tensor = second(first(third(x).tanh()).tanh())
        return y


def test_layers_may_run_in_another_order() -> None:
    """What was gathered for one that had run before is not kept beyond a load."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def load_and_evaluate(comm: dtlab.Comm) -> torch.Tensor:
        model, _ = zero(Backwards(), comm, 3)
        assert len(model.units) == 3
        y: torch.Tensor = model(x)
        load_full_state_dict(model, {k: 2 * v for k, v in full_state_dict(model).items()})
        return torch.stack([y, model(x)]).detach()

    one, twice = Backwards(), Backwards()
    twice.load_state_dict({k: 2 * v for k, v in one.state_dict().items()})
    expected = torch.stack([one(x), twice(x)]).detach()
    for y in on("simulator", load_and_evaluate, ranks=2).values:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_state_trains_the_same(stage: int) -> None:
    def train(comm: dtlab.Comm, offload: bool) -> dict[str, torch.Tensor]:
        model, optimizer = zero(MODELS["mlp"](torch.float64), comm, stage, offload=offload, lr=0.01)
        for number in range(4):
            step_of(model, optimizer, "mlp", number, torch.float64)
        if offload:
            assert all(u.master.data_ptr() != u.shard.data_ptr() for u in model.units)
        return full_state_dict(model)

    states = [on("simulator", train, offload, ranks=3).values[0] for offload in (False, True)]
    assert difference(*states) == 0


def test_bf16_parameters_have_float32_masters() -> None:
    def train(comm: dtlab.Comm) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
        model, optimizer = zero(GPT(GPTConfig(layers=2, hidden=32, context=8)), comm, 2,
                                torch.optim.SGD, param_dtype=torch.bfloat16, lr=1e-5)
        for number in range(8):
            step_of(model, optimizer, "gpt", number, torch.bfloat16)
        return full_state_dict(model), [p.dtype for p in model.module.parameters()]

    start = dict(GPT(GPTConfig(layers=2, hidden=32, context=8)).named_parameters())
    state, dtypes = on("simulator", train, ranks=2).values[0]
    assert set(dtypes) == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in state.values())
    moved = (state["tokens.weight"] - start["tokens.weight"]).abs()
    assert 0 < moved[moved > 0].min() < 1e-6  # steps that bf16 would have lost


# ---- optimizers --------------------------------------------------------------------------------


class Clamped(torch.optim.SGD):
    """What people write: momentum, a hook that clips gradients, one that clamps parameters."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, lr, momentum=0.9)
        self.steps = 0
        self.register_step_pre_hook(self.clip)
        self.register_step_post_hook(self.clamp)

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def clip(self, *_: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:  # none is there yet when a closure is given
                p.grad.clamp_(-0.01, 0.01)

    @torch.no_grad()
    def clamp(self, *_: Any) -> None:
        self.steps += 1
        for p in self.parameters():
            p.clamp_(-0.1, 0.1)


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, comm: dtlab.Comm | None) -> None:
    """Six steps, each with another learning rate, and momentum if there is one."""
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
    if "momentum" in optimizer.defaults:
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8))
    for number in range(6):
        shard = batch_of("mlp", number, size=12)
        shard = shard if comm is None else shard_of(shard, comm.rank, comm.size)
        optimizer.zero_grad()
        if number % 2:
            optimizer.step(lambda shard=shard: loss_of(model, shard).backward())  # type: ignore[arg-type]
        else:
            loss_of(model, shard).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("make", [*ELEMENTWISE, Clamped])
def test_any_elementwise_optimizer_steps_as_on_one_device(make: Any) -> None:
    def train(comm: dtlab.Comm, stage: int) -> tuple[dict[str, torch.Tensor], int]:
        model, optimizer = zero(MODELS["mlp"](torch.float64), comm, stage, make, lr=0.01)
        scheduled(model, optimizer, comm)
        return full_state_dict(model), getattr(optimizer, "steps", 6)

    one = MODELS["mlp"](torch.float64)
    scheduled(one, make(one.parameters(), lr=0.01), None)
    for stage in STAGES:
        for state, steps in on("simulator", train, stage, ranks=3).values:
            assert steps == 6
            assert difference(state, {k: p.detach() for k, p in one.named_parameters()}) < 1e-11


class ScheduleFree(torch.optim.SGD):
    """It swaps what it steps for what is evaluated, and back."""

    elementwise = True

    @torch.no_grad()
    def eval(self, factor: float = 0.5) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(factor)

    def train(self) -> None:
        self.eval(factor=2.0)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_schedule_free_optimizer_evaluates_is_on_all_ranks(stage: int, offload: bool
                                                                  ) -> None:
    batch = batch_of("mlp", 0)

    def outputs(model: Any, optimizer: Any) -> torch.Tensor:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.eval()
        evaluated = model(batch[0])
        optimizer.train()
        return torch.stack([evaluated, model(batch[0])]).detach()

    def train(comm: dtlab.Comm) -> torch.Tensor:
        return outputs(*zero(MODELS["mlp"](torch.float64), comm, stage, ScheduleFree, lr=0.1,
                             offload=offload))

    one = MODELS["mlp"](torch.float64)
    expected = outputs(one, ScheduleFree(one.parameters(), lr=0.1))
    for found in on("simulator", train, ranks=3).values:
        torch.testing.assert_close(found, expected)


def test_a_hook_may_clip_the_norm_of_all_shards() -> None:
    def train(comm: dtlab.Comm) -> list[float]:
        model, optimizer = zero(MODELS["mlp"](torch.float64), comm, 2, torch.optim.SGD, lr=1.0)
        norms: list[float] = []
        optimizer.register_step_pre_hook(
            lambda *_: norms.append(float(clip_grad_norm_(model, 1e-3))))
        before = full_state_dict(model)
        step_of(model, optimizer, "mlp", 0, torch.float64)
        moved = [(full_state_dict(model)[name] - before[name]).flatten() for name in before]
        return [*norms, float(torch.cat(moved).norm())]

    for norm, moved in on("simulator", train, ranks=2).values:
        assert norm > 0.1
        assert moved == pytest.approx(1e-3, rel=1e-2)


# ---- what must be refused ----------------------------------------------------------------------


class Unknown(torch.optim.SGD):
    pass


def scaled(comm: dtlab.Comm) -> None:
    model, optimizer = zero(nn.Linear(1, 1), comm, 1, torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)


def added(comm: dtlab.Comm) -> None:
    _, optimizer = zero(nn.Linear(1, 1), comm, 1, torch.optim.SGD)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(("mistake", "sentence"), [
    *((lambda comm, make=make: zero(nn.Linear(1, 1), comm, 1, make),
       f"{make.__name__} may need whole parameters.* elementwise = True")
      for make in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Unknown)),
    (lambda comm: zero(nn.Linear(1, 1), comm, 1, "adam"), "must be a class.* not 'adam'"),
    (scaled, "GradScaler would look for infinities"),
    (added, "nothing can be added to it"),
    (lambda comm: zero(nn.Linear(1, 1), comm, 4), "stages 1, 2 and 3, not 4"),
    (lambda comm: zero(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), comm),
     "parameters of one dtype, not of 2"),
])
def test_a_mistake_is_one_sentence(mistake: Any, sentence: str) -> None:
    with pytest.raises(dtlab.RankFailed, match=sentence):
        on("simulator", mistake, ranks=2)
