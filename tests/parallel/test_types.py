"""The checker of SPMD types accepts what is right and names what is wrong, before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dtlab
from dtlab.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from dtlab.models import GPT, GPTConfig
from dtlab.parallel import DataParallel, Mesh, clip_grad_norm_, tensor, types, zero
from dtlab.parallel.conversions import copy_to, reduce_from
from tests.parallel.silent_bugs import BUGS, checked, gradients
from tests.parallel.training import on

CONFIG = GPTConfig(layers=2, hidden=24, heads=4, kv_heads=1, context=8, dropout=0.1)
TOKENS, SEEDS = torch.zeros(4, 8, dtype=torch.int64), torch.arange(4)


def simulated(step: Any, *args: Any, ranks: int = 4, **axes: int) -> list[types.Typed]:
    def fn(comm: dtlab.Comm) -> list[types.Typed]:
        return types.check(step, Mesh(comm, **axes) if axes else comm, *args)

    made: list[types.Typed] = on("simulator", fn, ranks=ranks).values[0]
    return made


# ---- ten bugs, seven of them silent --------------------------------------------------------------


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_before_the_run_and_its_mend_is_accepted(name: str) -> None:
    with pytest.raises(dtlab.TypeMismatch, match=BUGS[name].says) as caught:
        on("simulator", checked, name, False, ranks=2)
    assert "silent_bugs.py:" in str(caught.value)  # the line
    on("simulator", checked, name, True, ranks=2)


@pytest.mark.parametrize("name", BUGS)
def test_its_symptom_is_a_gradient_and_only_much_later_a_loss(name: str) -> None:
    steps = 10
    (expected, whole), = on("simulator", gradients, name, True, steps, ranks=1).values
    right = on("simulator", gradients, name, True, steps, ranks=2).values
    wrong = on("simulator", gradients, name, False, steps, ranks=2).values
    for losses, found in right:
        assert losses == pytest.approx(expected, abs=1e-12)
        for key, gradient in found.items():
            if gradient.shape == whole[key].shape:  # not cut
                torch.testing.assert_close(gradient, whole[key])
    first = [losses[0] for losses, _ in wrong]
    if BUGS[name].silent:
        assert first == pytest.approx([expected[0]] * 2, abs=1e-12)
    else:
        assert any(abs(loss - expected[0]) > 1e-3 for loss in first)
    assert abs(wrong[0][0][-1] - expected[-1]) > 1e-6


# ---- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True, "regather"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tensor_and_sequence_parallelism_are_accepted(sequence: Any, kv_heads: int) -> None:
    config = GPTConfig(layers=2, hidden=24, heads=4, kv_heads=kv_heads, context=8, dropout=0.1)

    def step(comm: dtlab.Comm, tokens: Tensor, seeds: Tensor) -> Tensor:
        gpt = copy.deepcopy(tensor.shard(GPT(config), comm, sequence))
        return tensor.vocab_cross_entropy(comm, gpt(tokens, seeds), tokens)

    made = simulated(step, TOKENS, SEEDS)
    norm = next(row for row in made if row.operation == "layer_norm")
    assert norm.letters == {"ranks": "V" if sequence else "I"}
    assert norm.shape == ((4, 2, 24) if sequence else (4, 8, 24))
    assert norm.line.startswith("sequence.py" if sequence else "gpt.py")


@pytest.mark.parametrize("how", ["overlap", "flat", 1, 2, 3])
def test_data_parallelism_and_zero_are_accepted_with_tensor_parallelism(how: Any) -> None:
    def step(mesh: Mesh, tokens: Tensor, seeds: Tensor) -> Tensor:
        for x in (tokens, seeds):
            types.declare(x, mesh["dp"], types.VARYING)
        gpt = tensor.shard(GPT(CONFIG), mesh["tp"])
        if isinstance(how, int):
            model, optimizer = zero(gpt, mesh["dp"], how)
        else:
            model = DataParallel(gpt, mesh["dp"], how)
            optimizer = torch.optim.AdamW(model.parameters())
        loss = tensor.vocab_cross_entropy(mesh["tp"], model(tokens, seeds), tokens)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        return loss

    made = simulated(step, TOKENS, SEEDS, dp=2, tp=2)
    loss = [row for row in made if row.line.endswith("in vocab_cross_entropy")][-1]
    assert (loss.shape, loss.letters) == ((), {"dp": "V", "tp": "I"})


def test_data_parallelism_without_a_reduction_is_named() -> None:
    def step(comm: dtlab.Comm, x: Tensor) -> Tensor:
        types.declare(x, comm, types.VARYING)
        model = nn.Linear(3, 2)
        return model(x).sum()

    with pytest.raises(dtlab.TypeMismatch, match=r"linear mixes model\.weight, .* copy_to"):
        simulated(step, torch.zeros(5, 3))


def test_data_parallelism_by_hand_and_a_moving_average_are_accepted() -> None:
    def steps(comm: dtlab.Comm, x: Tensor, reduced: tuple[bool, ...]) -> None:
        types.declare(x, comm, types.VARYING)
        model, average = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            types.declare(p, comm, types.REPLICATED)
        for reduces in reduced:
            model(x).sum().backward()
            for p in model.parameters() if reduces else ():
                assert p.grad is not None
                all_reduce(comm, p.grad, "avg")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                for of_average, p in zip(average.parameters(), model.parameters(), strict=True):
                    of_average.lerp_(p, 0.1)

    simulated(steps, torch.zeros(5, 3), (True, True))
    for reduced in ((False,), (True, False)):
        with pytest.raises(dtlab.TypeMismatch, match=r"which is Partial|makes .* Partial"):
            simulated(steps, torch.zeros(5, 3), reduced)


def test_gradients_that_come_back_from_one_vector_are_accepted() -> None:
    """Padded with zeros, and assigned or copied, as ZeRO and buckets by hand do it."""
    def steps(comm: dtlab.Comm, x: Tensor, assigned: bool, reduces: bool, filled: int) -> None:
        types.declare(x, comm, types.VARYING)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters())
        for p in model.parameters():
            types.declare(p, comm, types.REPLICATED)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=assigned)
            model(x).sum().backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            flat = torch.zeros(12).add_(filled) if filled else torch.zeros(12)
            flat[:8] = torch.cat([*gradients, flat.new_zeros(0)])
            if reduces:
                flat = all_gather(comm, reduce_scatter(comm, flat.view(comm.size, -1)) / comm.size)
            for p, part in zip(model.parameters(), flat.flatten()[:8].split([6, 2]), strict=True):
                assert p.grad is not None
                if assigned:
                    p.grad = part.view_as(p)
                else:
                    p.grad.copy_(part.view_as(p))
            optimizer.step()

    for assigned in (True, False):
        simulated(steps, torch.zeros(5, 3), assigned, True, 0)
        with pytest.raises(dtlab.TypeMismatch, match="which is Partial"):
            simulated(steps, torch.zeros(5, 3), assigned, False, 0)
        with pytest.raises(dtlab.TypeMismatch, match="adds flat on every rank"):
            simulated(steps, torch.zeros(5, 3), assigned, True, 1)


def test_dropout_that_draws_no_numbers_is_accepted() -> None:
    def step(comm: dtlab.Comm, x: Tensor) -> None:
        for dropout in nn.Dropout(0.0), nn.Dropout(0.1).eval():
            dropout(nn.Linear(3, 2)(x)).sum().backward()

    simulated(step, torch.zeros(5, 3))


# ---- the rules -----------------------------------------------------------------------------------


def test_metadata_of_partial_and_a_partial_loss_are_accepted() -> None:
    def step(comm: dtlab.Comm, x: Tensor) -> None:
        types.declare(x, comm, types.PARTIAL)
        assert (x.shape, x.dim(), x.dtype, len(x), x.numel()) == ((2, 3), 2, torch.float32, 2, 6)
        assert x.is_leaf
        assert x.device == torch.zeros_like(x).device == x.new_full((2,), 1.0).device
        (torch.zeros_like(x) + torch.ones(2, 3)).relu()
        loss = (x * 3).sum()
        loss.backward()

    simulated(step, torch.zeros(2, 3, requires_grad=True), ranks=2)


@pytest.mark.parametrize(("says", "use"), [
    (r"item of x, which is Partial, is not linear: reduce_from\(comm, x\)",
     lambda _, x: x.item()),
    ("item of x, which is Partial, is not linear", lambda _, x: float(x)),
    ("rdiv of x, which is Partial, is not linear", lambda _, x: 1 / x),
    (r"mul of a tensor of shape \(1,\), which is Partial, multiplies it by x",
     lambda _, x: (x + x) * x),
    ("linear of x, which is Partial, multiplies it by x",
     lambda _, x: torch.nn.functional.linear(x, x, x)),
    ("add of x, which is Partial, adds 1 on every rank", lambda _, x: x + 1),
    ("all_reduce with op='max' of x, which is Partial", lambda comm, x: all_reduce(comm, x, "max")),
    ("all_reduce with op='min' of", lambda comm, x: all_reduce(comm, x=x, op="min")),
    ("reduce with op='prod' of", lambda comm, x: reduce(comm, x, op="prod")),
    ("broadcast takes what is Replicated, but x is Partial", broadcast),
    ("add of x, which is Partial, adds [01], which is Varying", lambda comm, x: x + comm.rank),
    ("linear mixes .* which is Invariant, with x, .*Partial: reduce_from",
     lambda _, x: nn.Linear(1, 1)(x)),
    (r"mul of x, which is Partial, multiplies it by 0\.?0?, which is Varying",
     lambda comm, x: x * (comm.rank * 0.5)),
    ("narrow of .* which is Partial, takes 0, which is Varying",
     lambda comm, x: x.expand(2).narrow(0, comm.rank, 1)),
])
def test_partial_is_refused_in_a_sentence(says: str, use: Any) -> None:
    def step(comm: dtlab.Comm) -> None:
        x = torch.zeros(1)
        types.declare(x, comm, types.PARTIAL)
        use(comm, x)

    with pytest.raises(dtlab.TypeMismatch, match=says):
        simulated(step, ranks=2)


@pytest.mark.parametrize("number", [
    lambda comm: comm.rank, lambda comm: 2 * comm.rank + 1, lambda comm: comm.rank * 0.5,
    lambda comm: 1 / (comm.rank + 1), lambda comm: abs(-comm.rank) % 3,
    lambda comm: 2**comm.rank // 2,
])
def test_a_number_that_depends_on_the_rank_is_varying(number: Any) -> None:
    def scaled(comm: dtlab.Comm, x: Tensor) -> None:
        types.declare(x, comm, types.REPLICATED)
        assert types.known_letters[x * number(comm)] == {"ranks": "V"}
        assert types.known_letters[torch.tensor(number(comm))] == {"ranks": "V"}
        assert types.known_letters[x[: comm.rank + 1]] == {"ranks": "V"}
        assert comm.rank == int(comm.rank) in range(2)

    simulated(scaled, torch.zeros(3, requires_grad=True), ranks=2)

    def mixed(comm: dtlab.Comm, x: Tensor) -> Tensor:
        return (x * number(comm)).sum()

    with pytest.raises(dtlab.TypeMismatch, match=r"mul mixes x, which is .*, with .*Varying"):
        simulated(mixed, torch.zeros(3, requires_grad=True), ranks=2)


def test_the_part_of_this_rank_is_varying() -> None:
    def step(comm: dtlab.Comm, x: Tensor, mended: bool) -> None:
        parts = x.chunk(comm.size)
        assert types.known_letters.get(parts[0], {}) == {}
        mine = parts[comm.rank]
        assert types.known_letters[mine] == {"ranks": "V"}
        assert mine.shape == torch.stack(parts)[comm.rank].shape == torch.cat(parts)[:2].shape
        weight = nn.Parameter(torch.zeros(3))
        mine @ (copy_to(comm, weight) if mended else weight)

    simulated(step, torch.zeros(4, 3), True, ranks=2)
    with pytest.raises(dtlab.TypeMismatch, match=r"mixes weight, .* with mine, .* Varying"):
        simulated(step, torch.zeros(4, 3), False, ranks=2)

    def cut(comm: dtlab.Comm, x: Tensor) -> None:
        x.chunk(comm.size)[comm.rank]  # and no scatter_to

    with pytest.raises(dtlab.TypeMismatch, match=r"test_types\.py:.* with 0, .* Varying"):
        simulated(cut, torch.zeros(4, 3, requires_grad=True), ranks=2)


def test_gradients_that_autograd_returns_have_the_types_of_gradients() -> None:
    def step(comm: dtlab.Comm, x: Tensor, y: Tensor) -> None:
        types.declare(y, comm, types.VARYING)
        loss = reduce_from(comm, copy_to(comm, x) @ y)
        found = torch.autograd.grad(loss, (x, y))
        assert [types.known_letters[g]["ranks"] for g in found] == ["I", "V"]

    simulated(step, torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True), ranks=2)


def test_a_rank_along_one_axis_is_the_same_along_the_others() -> None:
    def step(mesh: Mesh, x: Tensor) -> None:
        types.declare(x, mesh["dp", "tp"], types.REPLICATED)
        for number in (mesh["tp"].rank, mesh.coordinates["tp"] + 1):
            assert types.known_letters[x * number] == {"dp": "R", "tp": "V"}
        assert types.known_letters[x * mesh.comm.rank] == {"dp": "V", "tp": "V"}

    simulated(step, torch.zeros(3, requires_grad=True), dp=2, tp=2)


def test_a_conversion_of_the_wrong_type_says_what_it_takes() -> None:
    def twice(comm: dtlab.Comm) -> None:
        copy_to(comm, copy_to(comm, torch.zeros(2, requires_grad=True)))

    def summed(comm: dtlab.Comm) -> None:
        reduce_from(comm, copy_to(comm, torch.zeros(2, requires_grad=True)))

    with pytest.raises(dtlab.TypeMismatch, match=r"takes what is Invariant, .* added up twice"):
        simulated(twice, ranks=2)
    with pytest.raises(dtlab.TypeMismatch, match=r"takes what is Partial, .* a multiple of it"):
        simulated(summed, ranks=2)


def test_an_optimizer_may_count_its_steps_on_the_device_meta() -> None:
    """As torch's do before version 2.13."""
    optimizer: dict[str, Any] = {"__name__": "torch.optim.adam"}
    exec("def read(steps): return steps.item()", optimizer)
    assert simulated(lambda comm: optimizer["read"](torch.tensor(0.0)), ranks=2) == []


def test_bad_calls_say_so() -> None:
    with pytest.raises(dtlab.ConfigError, match="needs a function and the communicator or mesh"):
        on("simulator", lambda comm: types.check(comm, lambda c: None), ranks=2)  # type: ignore[arg-type]
    with pytest.raises(dtlab.ConfigError, match=r'item reads a value.* device="cpu"'):
        on("simulator", lambda comm: types.check(lambda c: float(torch.ones(1)), comm), ranks=2)
    with pytest.raises(dtlab.ConfigError, match="a type is one of R, I, V, P"):
        on("simulator", lambda comm: types.declare(torch.zeros(1), comm, "X"), ranks=2)


def test_with_data_it_also_runs_on_processes() -> None:
    def step(comm: dtlab.Comm, x: Tensor) -> Tensor:
        types.declare(x, comm, types.VARYING)
        model = DataParallel(nn.Linear(3, 2), comm)
        return cross_entropy(model(x), torch.zeros(5, dtype=torch.int64))

    def fn(comm: dtlab.Comm) -> dict[str, str]:
        return types.check(step, comm, torch.ones(5, 3), device="cpu")[-1].letters

    assert dtlab.run(fn, ranks=2).values == [{"ranks": "V"}] * 2
