"""Tensor and sequence parallelism compute what one device does, for the traffic of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtlab
from dtlab import cost
from dtlab.models import GPT, GPTConfig, text_batch
from dtlab.parallel import DataParallel, MemoryMeter, Mesh, clip_grad_norm_, hybrid, zero
from dtlab.parallel.sequence import SequenceNorm, gather_linear
from dtlab.parallel.sharded import full_tensors
from dtlab.parallel.tensor import (
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    shard,
    vocab_cross_entropy,
)
from tests.parallel.training import difference, on

SEQUENCE = False, True, "regather"
HEADS = (12, 12), (4, 2), (4, 1), (6, 3), (12, 3)  # heads, key-value heads
SEEDS = torch.arange(3) + 7


def config_of(heads: int, kv_heads: int, tied: bool = True, layers: int = 2) -> GPTConfig:
    return GPTConfig(layers=layers, hidden=24, heads=heads, kv_heads=kv_heads, context=12,
                     dropout=0.1, tied=tied)


def step(comm: dtlab.Comm | None, config: GPTConfig, sequence: bool | str = False,
         dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients: on one device, or whole on each rank."""
    tokens, targets = text_batch(0, 3, 12)
    gpt = GPT(config, dtype=dtype)
    if comm is None:
        loss = cross_entropy(gpt(tokens, SEEDS).flatten(0, 1), targets.flatten())
    else:
        loss = vocab_cross_entropy(comm, shard(gpt, comm, sequence)(tokens, SEEDS), targets)
    loss.backward()
    gradients = (full_tensors(gpt, comm, lambda p: p.grad) if comm is not None
                 else {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None})
    return float(loss.detach()), gradients


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "simulator"])
def test_loss_and_gradients_are_those_of_one_device(backend: str, ranks: int) -> None:
    configs = [config_of(heads, kv_heads, tied=number % 2 == 0)
               for number, (heads, kv_heads) in enumerate(HEADS)
               if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)]

    def steps(comm: dtlab.Comm) -> list[Any]:
        return [[step(comm, config, sequence) for sequence in SEQUENCE] for config in configs]

    alone = [step(None, config) for config in configs]
    for values in on(backend, steps, ranks=ranks).values:
        for config, found, (expected, gradients) in zip(configs, values, alone, strict=True):
            for loss, mine in found:
                assert abs(loss - expected) < 1e-10
                assert difference(mine, gradients) < 1e-10, config


@pytest.mark.parametrize("sequence", SEQUENCE)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_layer_sends_four_all_reduces(ranks: int, sequence: bool | str) -> None:
    sent = []
    for layers in (1, 2):
        config = config_of(12, 12, layers=layers)
        trace = on("simulator", step, config, sequence, ranks=ranks).trace
        gathers = sum(8 * 2 * p.numel() * (ranks - 1) / ranks  # full_tensors', of parts only
                      for name, p in GPT(config, device="meta").named_parameters()
                      if "norm" not in name and name != "positions.weight"
                      and not name.endswith(("out.bias", "mlp_down.bias")))
        sent.append(sum(trace.sent_bytes(r) for r in range(ranks)) / ranks - gathers)
    assert sent[1] - sent[0] == pytest.approx(
        cost.tensor_parallel_bytes(ranks, 3, 12, 24, itemsize=8, sequence=sequence), abs=1e-6)


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (4, False),
                                                 (2, "regather"), (4, "regather")])
def test_activations_are_those_of_the_formula(ranks: int, sequence: bool | str) -> None:
    """Korthikanti et al. 2022, table 2: of a layer, in 2 bytes, with dropout, within 2 %."""
    b, s, h, a = 4, 64, 64, 8

    def saved(comm: dtlab.Comm, layers: int) -> int:
        gpt = shard(GPT(GPTConfig(layers=layers, hidden=h, heads=a, context=s, dropout=0.1),
                        dtype=torch.bfloat16), comm, sequence)
        tokens, _ = text_batch(0, b, s)
        with MemoryMeter(gpt) as meter:
            logits = gpt(tokens, torch.arange(b))
            now = meter.now["activations"]
        del logits
        return now

    one, two = (on("simulator", saved, layers, ranks=ranks).values[0] for layers in (1, 2))
    attention = 5 * a * s / h / ranks
    expected = 34 / ranks + attention if sequence else 10 + 24 / ranks + attention
    assert (two - one) / (s * b * h) == pytest.approx(expected, rel=0.02)


def test_in_float32_it_is_what_torch_computes() -> None:
    def both(comm: dtlab.Comm, tied: bool) -> tuple[float, float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import loss_parallel

        from dtlab.bench.parallel import torch_tensor_parallel

        config = GPTConfig(layers=2, hidden=32, heads=4, context=16, vocab=64, tied=tied)
        tokens = torch.arange(48).view(3, 16) % 64
        targets = (tokens * 7 + 1) % 64
        mine = shard(GPT(config), comm)
        loss = vocab_cross_entropy(comm, mine(tokens), targets)
        loss.backward()
        theirs = torch_tensor_parallel(GPT(config), init_device_mesh("cpu", (comm.size,)))
        with loss_parallel():
            other = cross_entropy(theirs(tokens).flatten(0, 1), targets.flatten())
            other.backward()
        gradients = full_tensors(mine, comm, lambda p: p.grad)
        off = 0.0
        for name, p in theirs.named_parameters():
            assert p.grad is not None
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            if "qkv" in name:  # torch's are in order of ranks
                parts = whole.chunk(comm.size)
                whole = torch.cat([part.chunk(3)[i] for i in range(3) for part in parts])
            off = max(off, float((gradients[name] - whole).abs().max()))
        return abs(float(loss.detach()) - float(other.detach())), off

    for tied in (True, False):
        for loss, gradients in dtlab.run(both, tied, ranks=2).values:
            assert loss < 1e-5
            assert gradients < 1e-5


# ---- the loss ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any tensor made inside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@given(ranks=st.sampled_from([1, 2, 3, 4, 5, 8, 13]), vocab=st.integers(13, 40),
       rows=st.sampled_from([(1,), (4,), (2, 3)]), seed=st.integers(0, 99),
       reduction=st.sampled_from(["mean", "sum", "none"]),
       scale=st.sampled_from([1.0, 1e3]), ignored=st.sampled_from([0, 1, 6]),
       smoothing=st.sampled_from([0.0, 0.1, 1.0]),
       dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_loss_is_torchs_and_no_rank_sees_all_logits(
        ranks: int, vocab: int, rows: tuple[int, ...], seed: int, reduction: str, scale: float,
        ignored: int, smoothing: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*rows, vocab, generator=random)).to(dtype)
    targets = torch.randint(vocab, rows, generator=random)
    targets.view(-1)[0] = vocab - 1
    targets.view(-1)[:ignored] = 5  # the one to ignore; with 6 rows, all
    weights = torch.rand(rows if reduction == "none" else (), generator=random)

    def parts(comm: dtlab.Comm) -> tuple[Tensor, Tensor, int]:
        mine = logits.tensor_split(comm.size, -1)[comm.rank].clone().requires_grad_()
        with Largest() as largest:
            loss = vocab_cross_entropy(comm, mine, targets, reduction, 5, smoothing)
            (loss * weights).sum().backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad, largest.elements

    whole = logits.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
    expected = cross_entropy(whole.flatten(0, -2), targets.flatten(), reduction=reduction,
                             ignore_index=5, label_smoothing=smoothing)
    (expected * weights.flatten() if reduction == "none" else expected * weights).sum().backward()
    values = on("simulator", parts, ranks=ranks).values
    near = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    options = {"rtol": near, "atol": near, "equal_nan": True}
    for loss, _, largest in values:
        torch.testing.assert_close(loss.flatten(), expected.detach().flatten().to(loss), **options)
        assert largest <= max(ranks, 2 * logits[..., 0].numel(), -(-vocab // ranks)
                              * logits[..., 0].numel())
    found = torch.cat([gradient for _, gradient, _ in values], -1)
    assert whole.grad is not None
    torch.testing.assert_close(found, whole.grad.to(found), **options)


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "simulator"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_layers_made_by_hand_are_those_of_torch_seed_by_seed(backend: str, ranks: int) -> None:
    def mlp(comm: dtlab.Comm) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        embed = VocabEmbedding(comm, 11, 6)
        up, down = ColumnLinear(comm, 6, 7), RowLinear(comm, 7, 4)  # none divides 2 or 3 or 5
        y = down(up(embed(torch.arange(10))).relu())
        y.square().sum().backward()
        return y.detach(), full_tensors(up, comm, lambda p: p.grad)["weight"]

    torch.manual_seed(3)
    embed = torch.nn.Embedding(11, 6)
    up, down = torch.nn.Linear(6, 7), torch.nn.Linear(7, 4)
    expected = down(up(embed(torch.arange(10))).relu())
    expected.square().sum().backward()
    for y, gradient in on(backend, mlp, ranks=ranks).values:
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(gradient, up.weight.grad)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_gather_in_chunks_gives_the_product_of_the_whole(ranks: int, chunks: int) -> None:
    def product(comm: dtlab.Comm) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(0)
        whole = torch.randn(2, 12, 5, generator=random, dtype=torch.float64)
        weight = torch.randn(7, 5, generator=random, dtype=torch.float64).requires_grad_()
        x = whole.chunk(comm.size, 1)[comm.rank].clone().requires_grad_()
        if (12 // comm.size) % chunks:
            return whole, whole, whole
        y = gather_linear(comm, x, weight, chunks=chunks)
        y.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        torch.testing.assert_close(y, whole @ weight.T)
        expected = 2 * (whole @ weight.T) @ weight * comm.size  # the loss counts on each rank
        torch.testing.assert_close(x.grad, expected.chunk(comm.size, 1)[comm.rank])
        torch.testing.assert_close(weight.grad, (2 * whole @ weight.T).flatten(0, 1).T
                                   @ whole.flatten(0, 1))
        return y, x.grad, weight.grad

    on("simulator", product, ranks=ranks)


def test_chunks_hide_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the product of all positions takes as long as their gather."""
    real = torch.nn.functional.linear

    def slow(chunk: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        with weight.comm.compute("product", 1.2e-3 * chunk.shape[-2] / 300):
            return real(chunk, weight, bias)

    def fn(comm: dtlab.Comm, chunks: int) -> None:
        weight: Any = torch.empty(10, 100, device="meta")
        weight.comm = comm
        gather_linear(comm, torch.empty(1, 300, 100, device="meta"), weight, chunks=chunks)

    monkeypatch.setattr("dtlab.parallel.sequence.linear", slow)
    network = dtlab.topology.uniform(4, 1e-6, 3e8)
    waits = {chunks: dtlab.simulate(fn, chunks, network=network).trace.exposed_s(0)
             for chunks in (1, 4)}
    assert waits[4] < 0.3 * waits[1]


def test_an_embeddings_padding_row_gets_no_gradient() -> None:
    whole = torch.nn.Embedding(7, 3, padding_idx=5)
    tokens = torch.tensor([[5, 0, 6], [4, 5, 5]])

    def fn(comm: dtlab.Comm) -> Tensor:
        mine = VocabEmbedding(comm, 7, 3, like=whole)
        mine(tokens).square().sum().backward()
        return full_tensors(mine, comm, lambda p: p.grad)["weight"]

    whole(tokens).square().sum().backward()
    for found in on("simulator", fn, ranks=3).values:
        torch.testing.assert_close(found, whole.weight.grad)


@pytest.mark.parametrize("backend", ["gloo", "simulator"])
@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_without_seeds_is_rank_zeros_on_all_ranks(backend: str, sequence: bool) -> None:
    config = config_of(4, 4)
    tokens, targets = text_batch(0, 3, 12)

    def fn(comm: dtlab.Comm) -> dict[str, Tensor]:
        gpt = shard(GPT(config, dtype=torch.float64), comm, sequence)
        torch.manual_seed(4 + comm.rank)
        vocab_cross_entropy(comm, gpt(tokens), targets).backward()
        return full_tensors(gpt, comm, lambda p: p.grad)

    gpt = GPT(config, dtype=torch.float64)
    torch.manual_seed(4)
    cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    for found in on(backend, fn, ranks=2).values:
        assert difference(found, gradients) < 1e-12


def test_under_autocast_positions_gathered_again_have_the_gradients_of_a_whole_gather() -> None:
    def fn(comm: dtlab.Comm, sequence: bool | str) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = ColumnLinear(comm, 8, 4, sequence=sequence), torch.randn(2, 3, 8)
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        return [p.grad for p in (x, *layer.parameters()) if p.grad is not None]

    again, whole = (on("simulator", fn, how, ranks=2).values for how in ("regather", True))
    torch.testing.assert_close(again, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_like_torchs_train_as_these_would_and_leave_them_alone(dtype: torch.dtype) -> None:
    def trained(comm: dtlab.Comm | None) -> tuple[Tensor, bool]:
        torch.manual_seed(0)
        whole = up, down = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        before = [p.detach().clone() for p in whole.parameters()]
        layers = whole if comm is None else nn.Sequential(
            ColumnLinear(comm, 6, 8, like=up), RowLinear(comm, 8, 4, like=down))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = layers(torch.eye(6))
            y.square().sum().backward()
            optimizer.step()
        return y.detach(), all(map(torch.equal, whole.parameters(), before))

    expected, _ = trained(None)
    for y, unchanged in on("simulator", trained, ranks=2).values:
        torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)  # of this dtype
        assert unchanged


def test_copies_of_an_infinite_weight_are_one_infinite_weight() -> None:
    def fn(comm: dtlab.Comm) -> bool:
        gpt = GPT(config_of(4, 1, layers=1))
        weight = gpt.blocks[0].attention.qkv.weight
        with torch.no_grad():
            weight[-1, 0] = torch.inf
        before = weight.detach().clone()
        return before.equal(full_tensors(shard(gpt, comm), comm)["blocks.0.attention.qkv.weight"])

    assert all(on("simulator", fn, ranks=2).values)


@pytest.mark.parametrize("renewed", ["to_empty", "assign"])
def test_new_parameters_of_a_layer_are_its_parts_as_the_first_ones_were(renewed: str) -> None:
    def fn(comm: dtlab.Comm) -> float:
        torch.manual_seed(0)
        layers = nn.Sequential(ColumnLinear(comm, 3, 4), RowLinear(comm, 4, 2)).double()
        state = layers.state_dict()
        if renewed == "to_empty":
            layers.to("meta").to_empty(device="cpu")
        layers.load_state_dict(state, assign=renewed == "assign")
        model = DataParallel(layers, comm.subgroup([comm.rank]))
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        return float(clip_grad_norm_(model, 1.0))

    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    one(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    expected = float(nn.utils.clip_grad_norm_(one.parameters(), 1.0))
    assert on("simulator", fn, ranks=2).values == pytest.approx([expected] * 2)


# ---- what doesn't fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(("says", "call"), [
    ("token 10 is not in the vocabulary, which is 0 … 9",
     lambda comm, _: VocabEmbedding(comm, 10, 4)(torch.tensor([3, 10]))),
    ("token -1 is not", lambda comm, _: VocabEmbedding(comm, 10, 4)(torch.tensor([3, -1]))),
    ("target 10 is not in the vocabulary, which is 0 … 9",
     lambda comm, x: vocab_cross_entropy(comm, x, torch.tensor([10, 0]))),
    ("target -1 is not", lambda comm, x: vocab_cross_entropy(comm, x, torch.tensor([-1, -100]))),
    (r"need int64 targets of shape \(2,\), not torch.int64 of \(1,\)",
     lambda comm, x: vocab_cross_entropy(comm, x, torch.tensor([1]))),
    (r"label_smoothing must lie in \[0, 1\], not 1.5",
     lambda comm, x: vocab_cross_entropy(comm, x, torch.tensor([1, 1]), label_smoothing=1.5)),
    (r"label_smoothing must lie in \[0, 1\], not 'a'",
     lambda comm, x: vocab_cross_entropy(comm, x, torch.tensor([1, 1]), label_smoothing="a")),
    (r"at least one column of the logits, but the ranks have \[5, 0\]",
     lambda comm, x: vocab_cross_entropy(comm, x[:, : 5 - 5 * comm.rank], torch.tensor([1, 1]))),
    ("without max_norm", lambda comm, _: VocabEmbedding(
        comm, 10, 4, like=torch.nn.Embedding(10, 4, max_norm=1.0))),
    (r"`like` must be an nn.Linear with a weight of shape \(4, 2\), not Linear\(.*3",
     lambda comm, _: RowLinear(comm, 2, 4, like=torch.nn.Linear(3, 4))),
    (r"`like` must be an nn.Linear with .* not Embedding",
     lambda comm, _: ColumnLinear(comm, 4, 2, like=torch.nn.Embedding(2, 4))),
    (r"the layer takes \(…, [23]\) here, not \(2, 5\)",
     lambda comm, x: RowLinear(comm, 5, 4)(x)),
    ("chunks must be a whole number, 1 or more, not 0",
     lambda comm, x: gather_linear(comm, x, x, chunks=0)),
    (r"computes in torch.bfloat16; convert its input with x.to\(torch.bfloat16\)",
     lambda comm, x: ColumnLinear(comm, 5, 4).bfloat16()(x)),
    (r"seed for each sample: \(2,\) of them, not \(1,\)",
     lambda comm, _: shard(GPT(config_of(4, 4)), comm)(
         torch.ones(2, 4, dtype=torch.int64), torch.tensor([7]))),
    ("dropout of 0.1 needs the samples' seeds",
     lambda comm, _: GPT(config_of(4, 4)).blocks[0](torch.ones(2, 3, 24))),
    ("sharded before", lambda comm, _: shard(shard(GPT(config_of(4, 4)), comm), comm)),
    (r"different models; .* seed: 'tokens\.weight' adds up to .* on rank 0, but .* on rank 1",
     lambda comm, _: shard(GPT(config_of(4, 4), seed=comm.rank), comm)),
    (r"takes a dtlab\.models\.GPT, not Linear", lambda comm, _: shard(nn.Linear(2, 2), comm)),
])
def test_what_torch_refuses_or_would_differ_on_ranks_is_a_sentence_on_every_rank(
        says: str, call: Any) -> None:
    def fn(comm: dtlab.Comm) -> str:
        with pytest.raises((dtlab.ConfigError, dtlab.ShapeMismatch), match=says) as caught:
            call(comm, torch.ones(2, 5))
        return str(caught.value)

    on("simulator", fn, ranks=2)


@pytest.mark.parametrize(("config", "sequence", "says"), [
    (GPTConfig(layers=1, hidden=24, heads=4), False, "3 ranks can't share 4 heads"),
    (GPTConfig(layers=1, hidden=24, heads=6, kv_heads=2), False, "and 2 key-value heads"),
    (GPTConfig(layers=1, hidden=24, heads=3, vocab=2), False, "can't share a vocabulary of 2"),
    (GPTConfig(layers=1, hidden=24, heads=3), "yes", 'False, True or "regather"'),
    (GPTConfig(layers=1, hidden=24, heads=3), True, "3 ranks can't share 8 evenly"),
])
def test_what_does_not_divide_says_so(config: GPTConfig, sequence: Any, says: str) -> None:
    def fn(comm: dtlab.Comm) -> Tensor:
        return shard(GPT(config), comm, sequence)(torch.zeros(1, 8, dtype=torch.int64)).detach()

    with pytest.raises(dtlab.DtlabError, match=says):
        on("simulator", fn, ranks=3)


def test_a_module_without_data_is_a_sentence_on_processes() -> None:
    gpt = GPTConfig(layers=1, hidden=8, heads=2, context=4)
    calls: list[Any] = [
        lambda comm: DataParallel(torch.nn.Linear(2, 2, device="meta"), comm),
        lambda comm: zero(torch.nn.Linear(2, 2, device="meta"), comm, 3),
        lambda comm: hybrid(GPT(gpt, device="meta"), Mesh(comm, dp=2)),
        lambda comm: hybrid(GPT(gpt, device="meta"), Mesh(comm, tp=2))[0].backward(
            *2 * [torch.zeros(2, 4, dtype=torch.int64)]),
    ]

    def fn(comm: dtlab.Comm) -> None:
        for call in calls:
            with pytest.raises(dtlab.ConfigError, match=r"meta has no data.* module\.to_empty"):
                call(comm)

    dtlab.run(fn, ranks=2)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_a_norm_of_cut_positions_has_its_parameters(options: dict[str, bool]) -> None:
    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(3, **options).double()

    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 2, 4, 3, dtype=torch.float64, generator=random)

    def cut(comm: dtlab.Comm) -> dict[str, Any]:
        with pytest.raises(dtlab.ConfigError, match=r"takes an nn\.LayerNorm, not Linear"):
            SequenceNorm(comm, nn.Linear(3, 3))
        mine = SequenceNorm(comm, norm())
        part, factors = (each.detach().chunk(2, 1)[comm.rank] for each in (x, weights))
        (mine(part.clone().requires_grad_()) * factors).sum().backward()
        return {name: p.grad for name, p in mine.named_parameters()}

    one = norm()
    (one(x.requires_grad_()) * weights).sum().backward()
    for gradients in on("simulator", cut, ranks=2).values:
        torch.testing.assert_close(gradients, {name: p.grad for name, p in one.named_parameters()})


@pytest.mark.parametrize("sequence", [False, True, "regather"])
def test_second_derivatives_are_those_of_one_device(sequence: Any) -> None:
    """As of a penalty on the inputs' gradient; what is gathered again for backward refuses."""
    x = torch.randn(1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def second(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        gradient, = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, *(p.grad for p in model[0].parameters())]

    def layers() -> list[nn.Linear]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4).double() for _ in range(2)]

    def step(comm: dtlab.Comm) -> list[Tensor] | None:
        up, down = layers()
        model = nn.Sequential(ColumnLinear(comm, 4, 4, like=up, sequence=sequence),
                              nn.Tanh(),
                              RowLinear(comm, 4, 4, like=down, sequence=sequence))
        mine = x.chunk(2, 1)[comm.rank] if sequence else x
        with pytest.raises(dtlab.ConfigError, match="func can't transform"):
            torch.func.jvp(model, (mine,), (mine,))
        if sequence != "regather":
            return second(model, mine)
        with pytest.raises(dtlab.ConfigError, match="can't be differentiated twice"):
            second(model, mine)
        return None

    up, down = layers()
    expected = second(nn.Sequential(up, nn.Tanh(), down), x)
    cuts = [1 if sequence else None, 0, 0]
    for rank, found in enumerate(on("simulator", step, ranks=2).values):
        for mine, whole, dim in zip(found or [], expected, cuts, strict=bool(found)):
            torch.testing.assert_close(
                mine, whole if dim is None else whole.chunk(2, dim)[rank])


def test_a_compiled_model_sends_what_it_sends_uncompiled() -> None:
    def losses(comm: dtlab.Comm, compiled: bool) -> list[float]:
        gpt = shard(GPT(GPTConfig(layers=1, hidden=8, heads=2, context=8)), comm, "regather")
        model = torch.compile(gpt, backend="eager") if compiled else gpt
        found = []
        for size in 2, 3:  # the second size makes the compiler look for symbols
            tokens, targets = text_batch(0, size, 8)
            loss = vocab_cross_entropy(comm, model(tokens), targets)
            loss.backward()
            found += [loss.item(), *(float(p.grad.norm()) for p in gpt.parameters())]
        return found

    assert on("gloo", losses, True, ranks=2).values == on("gloo", losses, False, ranks=2).values
