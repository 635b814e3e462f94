"""A GPT on meshes of pp, dp and tp ranks, with ZeRO, equals one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.models import GPT, GPTConfig, gpt_shape, text_batch
from dtlab.parallel import (
    Layout,
    MemoryMeter,
    Mesh,
    clip_grad_norm_,
    full_state_dict,
    hybrid,
    load,
    predict,
    save,
    types,
)
from dtlab.parallel.pipeline import (
    Schedule,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from tests.parallel.training import difference, on

CONFIG = GPTConfig(layers=2, hidden=32, heads=8, context=8, dropout=0.1)
DEEP = replace(CONFIG, layers=6)  # with embedding and head, eight stages
UNTIED = GPTConfig(layers=2, hidden=24, heads=12, kv_heads=2, context=8, dropout=0.1, tied=False)
ADAM, MOMENTUM = {"lr": 1e-3}, {"lr": 0.3, "momentum": 0.9}
OPTIMIZERS = {"adam": (torch.optim.Adam, ADAM), "momentum": (torch.optim.SGD, MOMENTUM)}
STEPS, MAX_NORM = 2, 0.4
Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets = text_batch(step, size, 8)
    return tokens, targets, torch.arange(size) + 1000 * step


@cache
def one_device(config: GPTConfig, optimizer: str, size: int, steps: int = STEPS) -> Trained:
    """((loss, norm of the gradient) of each step, the parameters at the end)."""
    gpt = GPT(config, dtype=torch.float64)
    make, options = OPTIMIZERS[optimizer]
    stepper = make(gpt.parameters(), **options)
    seen = []
    for step in range(steps):
        tokens, targets, seeds = batch_of(step, size)
        loss = cross_entropy(gpt(tokens, seeds).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), MAX_NORM)
        seen.append((float(loss.detach()), float(norm)))
        stepper.step()
        stepper.zero_grad()
    return seen, {name: p.detach() for name, p in gpt.named_parameters()}


def built(comm: dtlab.Comm, axes: dict[str, int], config: GPTConfig, optimizer: str,
          options: dict[str, Any]) -> Any:
    make, settings = OPTIMIZERS[optimizer]
    return hybrid(GPT(config, dtype=torch.float64).to(comm.device), Mesh(comm, **axes),
                  optimizer=make, **settings, **options)


def train(comm: dtlab.Comm, axes: dict[str, int], config: GPTConfig, optimizer: str, size: int,
          options: dict[str, Any], steps: range = range(STEPS), read: Path | None = None,
          write: Path | None = None) -> Trained:
    model, stepper = built(comm, axes, config, optimizer, options)
    if read:
        load(read, model, stepper)
    seen = []
    for step in steps:
        loss = model.backward(*(part.to(comm.device) for part in batch_of(step, size)))
        norm = clip_grad_norm_(model, MAX_NORM)
        seen.append((float(loss), float(norm)))
        stepper.step()
        stepper.zero_grad()
    if write:
        save(write, model, stepper)
    return seen, full_state_dict(model)


def assert_equal(values: list[Trained], expected: Trained) -> None:
    for seen, parameters in values:
        assert torch.tensor(seen).sub(torch.tensor(expected[0])).abs().max() < 1e-9
        assert difference(parameters, expected[1]) < 1e-9


FACTORIZATIONS = [(pp, dp, 8 // pp // dp) for pp in (1, 2, 4, 8) for dp in (1, 2, 4, 8)
                  if 8 % (pp * dp) == 0]


@pytest.mark.parametrize(("pp", "dp", "tp"), FACTORIZATIONS)
def test_all_factorizations_of_eight_ranks_equal_one_device(pp: int, dp: int, tp: int) -> None:
    config = DEEP if pp == 8 else CONFIG
    for stage in (0, 1, 2, 3)[: 4 if pp == 1 else 3]:
        optimizer = "adam" if stage % 2 else "momentum"
        options = {"micro_batches": 2 if dp < 8 else 1, "stage": stage, "sequence": stage > 0}
        values = on("simulator", train, {"pp": pp, "dp": dp, "tp": tp}, config, optimizer, 8,
                    options, ranks=8).values
        assert_equal(values[:: 3], one_device(config, optimizer, 8))


ZeroBubble = Callable[[int, int], Schedule]


@pytest.mark.parametrize(("axes", "config", "options"), [
    ({"tp": 2, "pp": 3, "dp": 2}, CONFIG, {"schedule": zb_h1, "micro_batches": 3, "stage": 2}),
    ({"dp": 3, "tp": 4}, UNTIED, {"stage": 3, "micro_batches": 2, "sequence": "regather"}),
    ({"pp": 2, "tp": 6}, UNTIED, {"schedule": interleaved, "micro_batches": 4}),
    ({"pp": 4, "dp": 3}, DEEP, {"schedule": zb_v, "micro_batches": 1, "stage": 1}),
    ({"tp": 4, "dp": 3}, CONFIG, {"micro_batches": 4, "recompute": True, "stage": 2}),
    ({"dp": 3, "pp": 2, "tp": 2}, UNTIED, {"schedule": dualpipe_v, "stage": 2}),
    ({"dp": 12}, UNTIED, {"stage": 1}),
    ({"pp": 2, "dp": 6}, UNTIED, {"schedule": zb_h2, "micro_batches": 2, "recompute": True}),
    ({"tp": 12}, UNTIED, {"sequence": False, "micro_batches": 2}),
])
def test_a_sample_of_twelve_ranks(axes: dict[str, int], config: GPTConfig,
                                  options: dict[str, Any]) -> None:
    values = on("simulator", train, axes, config, "adam", 12, options, ranks=12).values
    assert_equal(values[:: 5], one_device(config, "adam", 12))


@pytest.mark.parametrize(("axes", "options"), [
    ({"pp": 2, "dp": 2, "tp": 2}, {"stage": 1, "micro_batches": 2, "sequence": True}),
    ({"tp": 2, "pp": 4}, {"schedule": gpipe, "micro_batches": 4}),
])
def test_processes(axes: dict[str, int], options: dict[str, Any]) -> None:
    values = on("gloo", train, axes, CONFIG, "adam", 8, options, ranks=8).values
    assert_equal(values, one_device(CONFIG, "adam", 8))


@pytest.mark.parametrize(("before", "after"), [
    (({"pp": 2, "dp": 2, "tp": 2}, {"stage": 1, "micro_batches": 2}), ({"dp": 3}, {"stage": 3})),
    (({"tp": 4}, {}), ({"pp": 4, "dp": 2}, {"stage": 2, "micro_batches": 2})),
    (({"dp": 2}, {"stage": 2}), ({"tp": 2, "pp": 2}, {})),
])
def test_a_checkpoint_goes_on_on_any_mesh(
        tmp_path: Path, before: tuple[dict[str, int], dict[str, Any]],
        after: tuple[dict[str, int], dict[str, Any]]) -> None:
    folder = tmp_path / "checkpoint"
    ranks = [torch.Size(axes.values()).numel() for axes, _ in (before, after)]
    on("simulator", train, before[0], CONFIG, "adam", 12, before[1], range(1), None, folder,
       ranks=ranks[0])
    values = on("simulator", train, after[0], CONFIG, "adam", 12, after[1], range(1, STEPS),
                folder, ranks=ranks[1]).values
    seen, parameters = one_device(CONFIG, "adam", 12)
    assert_equal(values, (seen[1:], parameters))


@pytest.mark.parametrize(("before", "after", "stage"), [
    ({"pp": 2}, {"pp": 2}, 0), ({"pp": 4}, {"dp": 2}, 1), ({"dp": 2}, {"pp": 3, "dp": 2}, 2)])
def test_parameters_keep_their_groups_and_options_on_any_mesh(
        tmp_path: Path, before: dict[str, int], after: dict[str, int], stage: int) -> None:
    """Stages of a pipeline begin with parameters of different groups, and one may lack a group."""
    def options_of(name: str) -> dict[str, float]:
        return {"lr": 0.3 if name.endswith("bias") or "norm" in name else 0.2}

    def fn(comm: dtlab.Comm, axes: dict[str, int], use: Any) -> list[float]:
        model, stepper = hybrid(GPT(UNTIED), Mesh(comm, **axes), stage=stage, groups=options_of)
        use(tmp_path, model, stepper)
        groups = {p: group["lr"] for group in stepper.param_groups for p in group["params"]}
        for part in model.stepped_parts():
            assert groups[part.tensor] == options_of(part.name)["lr"], part.name
        return [group["lr"] for group in stepper.param_groups]

    for axes, use in ((before, save), (after, load)):
        values = on("simulator", fn, axes, use, ranks=torch.Size(axes.values()).numel()).values
        assert all(groups == [0.2, 0.3] for groups in values)


@pytest.mark.parametrize("options", [{}, {"stage": 2, "sequence": True}])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_types_accept_it(options: dict[str, Any], dropout: float) -> None:
    def step(mesh: Mesh, tokens: Tensor) -> None:
        gpt = GPT(GPTConfig(layers=2, hidden=8, heads=2, context=4, dropout=dropout))
        model, stepper = hybrid(gpt, mesh, micro_batches=2, **options)
        model.backward(tokens, tokens)
        stepper.step()

    def fn(comm: dtlab.Comm) -> int:
        mesh = Mesh(comm, pp=2, dp=2, tp=2)
        return len(types.check(step, mesh, torch.zeros(4, 4, dtype=torch.int64)))

    assert min(on("simulator", fn, ranks=8).values) > 50


@pytest.mark.parametrize(("axes", "options", "size", "says"), [
    ({"pp": 2, "dp": 2}, {"stage": 3}, 4, "stage of ZeRO must be 0, 1, 2 or, without a pipeline"),
    ({"dp": 4}, {"stage": 3, "schedule": zb_v}, 4, "not 3 with 2 stages of the pipeline"),
    ({"dp": 4}, {"stage": 4}, 4, "not 4"),
    ({"dp": 4}, {"param_dtype": torch.bfloat16, "offload": True}, 4,
     "offload, param_dtype are options of ZeRO, which needs a stage"),
    ({"dp": 2, "cp": 2}, {}, 4, "knows the axes pp, dp and tp, but the mesh has cp"),
    ({"tp": 4}, {"schedule": "1F1B"}, 4, "must be a Schedule or a function"),
    ({"pp": 4}, {"schedule": gpipe(2, 1)}, 4, "the schedule is for 2 ranks, but there are 4"),
    ({"pp": 4}, {"schedule": lambda p, m: interleaved(p, m, 3)}, 4, "can't make 12 stages"),
    ({"dp": 2, "pp": 2}, {"micro_batches": 3}, 8, r"shape \(8, 8\) can't be cut for 2 dp ranks"),
    ({"dp": 3}, {}, 3, r"a mesh of dp=3 has 3 ranks"),
])
def test_what_does_not_fit_says_so(axes: dict[str, int], options: dict[str, Any], size: int,
                                   says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        on("simulator", train, axes, CONFIG, "adam", size, options, ranks=4)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"tp": 2}])
def test_ranks_with_batches_of_their_own_are_told(axes: dict[str, int]) -> None:
    def fn(comm: dtlab.Comm) -> None:
        model, _ = built(comm, axes, CONFIG, "adam", {})
        model.backward(*torch.full((2, 4, 8), comm.rank))

    with pytest.raises(dtlab.ConfigError, match="rank 1 has another batch than rank 0"):
        on("simulator", fn, ranks=2)


def test_what_this_gpt_can_not_do_says_so() -> None:
    def long(comm: dtlab.Comm) -> None:
        model, _ = built(comm, {"pp": 2}, CONFIG, "adam", {})
        model.backward(*torch.zeros(2, 4, 9, dtype=torch.int64))

    def called(comm: dtlab.Comm) -> None:
        built(comm, {"pp": 2}, CONFIG, "adam", {})[0](torch.zeros(4, 8, dtype=torch.int64))

    def frozen(comm: dtlab.Comm) -> None:
        gpt = GPT(CONFIG)
        gpt.norm.requires_grad_(False)
        hybrid(gpt, Mesh(comm, dp=2))

    for fn, says in ((long, "9 positions are more than its context of 8"),
                     (called, "for outputs, load full_state_dict"),
                     (frozen, "some of this one are frozen")):
        with pytest.raises(dtlab.ConfigError, match=says):
            on("simulator", fn, ranks=2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_autograd_it_evaluates_and_changes_no_gradient(stage: int) -> None:
    tokens, targets, seeds = batch_of(0, 4)

    def fn(comm: dtlab.Comm) -> float:
        model, _ = built(comm, {"pp": 2, "dp": 2}, CONFIG, "adam", {"stage": stage})
        before = model.named_gradients()
        with torch.inference_mode():
            loss = float(model.backward(tokens, targets, seeds))
        assert [name for name, _ in model.named_gradients()] == [name for name, _ in before]
        return loss

    expected = cross_entropy(GPT(CONFIG, dtype=torch.float64)(tokens, seeds).flatten(0, 1),
                             targets.flatten())
    assert on("simulator", fn, ranks=4).values == pytest.approx([expected.item()] * 4)


@pytest.mark.parametrize(("axes", "options"), [
    ({"pp": 2, "dp": 2, "tp": 2}, {"micro_batches": 2, "sequence": True, "stage": 1}),
    ({"dp": 8}, {"stage": 3}),
])
def test_dropout_without_seeds_is_that_of_one_device_with_rank_zeros_generator(
        axes: dict[str, int], options: dict[str, Any]) -> None:
    tokens, targets, _ = batch_of(0, 8)

    def fn(comm: dtlab.Comm) -> tuple[float, float]:
        model, _ = built(comm, axes, CONFIG, "adam", options)
        torch.manual_seed(4 + comm.rank)
        loss = model.backward(tokens, targets)
        model.eval()
        return float(loss), float(model.backward(tokens, targets))

    gpt = GPT(CONFIG, dtype=torch.float64)
    torch.manual_seed(4)
    expected = [float(cross_entropy(gpt.train(mode)(tokens).flatten(0, 1).detach(),
                                    targets.flatten())) for mode in (True, False)]
    for found in on("simulator", fn, ranks=8).values:
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("vocab", "p", "name", "schedule", "tied"), [
    (256, 1, "1F1B", one_f_one_b, True), (50_000, 1, "1F1B", one_f_one_b, True),
    (5_000, 2, "gpipe", gpipe, True), (5_000, 4, "ZB-H1", zb_h1, True),
    (5_000, 2, "interleaved", interleaved, True), (5_000, 2, "ZB-V", zb_v, False)])
def test_the_planned_memory_is_that_of_a_step(vocab: int, p: int, name: str, schedule: Any,
                                              tied: bool) -> None:
    """Also of micro-batches whose logits wait for backward."""
    config = GPTConfig(layers=4, hidden=64, heads=4, vocab=vocab, context=128, tied=tied)
    m = 8 if p > 1 else 1

    def peak(comm: dtlab.Comm) -> int:
        model, optimizer = hybrid(GPT(config), Mesh(comm, pp=p), micro_batches=m,
                                  schedule=schedule)
        tokens = torch.arange(4 * m * 128).view(4 * m, 128) % vocab
        for _ in range(2):
            with MemoryMeter(model.module, optimizer) as meter:
                model.backward(tokens, tokens)
                optimizer.step()
                optimizer.zero_grad()
        return meter.peak

    shape = gpt_shape(4, 64, 4, vocab, 128)
    if not tied:
        shape = shape._replace(tied=False, parameters=shape.parameters + 64 * vocab)
    layout = Layout({"pp": p}, 4, m, name, 2 if name in ("interleaved", "ZB-V") else 1)
    planned = predict(shape, dtlab.topology.uniform(p, 5e-6, 1e10), layout,
                      precision="float32").memory_bytes
    measured = max(on("simulator", peak, ranks=p).values)
    assert planned / 1.4 < measured < 1.1 * planned
