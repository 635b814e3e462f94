"""What the checker of types says of an operation is what numbers say: two ranks' parts of a sum may
pass through it if and only if what it makes of them adds up to what it makes of the sum."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.utils._pytree import tree_leaves

import dtlab
from dtlab.parallel import types
from dtlab.parallel.linear import LINEAR
from tests.parallel.training import on

S = (4, 4)
INDEX, MASK = torch.tensor([[0, 2, 1, 1]]), torch.tensor([True, False, True, True])
ROW = torch.tensor([1, 3])
UNARY: dict[str, tuple[Any, ...]] = {
    "cumsum": (0,), "view": (2, 8), "reshape": (16,), "unflatten": (0, (2, 2)), "unsqueeze": (0,),
    "transpose": (0, 1), "permute": (1, 0), "swapaxes": (0, 1), "swapdims": (0, 1),
    "movedim": (0, 1), "moveaxis": (0, 1), "roll": (1, 0), "flip": ((0,),), "split": (3,),
    "chunk": (2,), "unsafe_chunk": (2,), "tensor_split": (3,), "split_with_sizes": ([1, 3],),
    "hsplit": (2,), "vsplit": (2,), "dsplit": (2,), "unfold": (0, 2, 1), "select": (0, 1),
    "narrow": (0, 1, 2), "narrow_copy": (0, 1, 2), "index_select": (0, ROW), "gather": (0, INDEX),
    "take": (ROW,),
    "take_along_dim": (INDEX, 0), "masked_select": (MASK,), "expand": (2, 4, 4),
    "expand_as": (torch.zeros(2, 4, 4),), "broadcast_to": ((2, 4, 4),),
    "view_as": (torch.zeros(2, 8),), "reshape_as": (torch.zeros(2, 8),), "repeat": (2, 1),
    "repeat_interleave": (2,), "tile": ((2, 1),), "to": (torch.float32,),
    "type_as": (torch.zeros(1),), "avg_pool1d": (2,), "avg_pool2d": (2,),
    "avg_pool3d": ((1, 2, 2),),
    "adaptive_avg_pool1d": (2,), "adaptive_avg_pool2d": (2,), "adaptive_avg_pool3d": (2,)}


def unary(name: str) -> Callable[[Tensor], Any]:
    """What torch has by this name, on a tensor of a shape that it takes."""
    def call(x: Tensor) -> Any:
        if "pool" in name:
            x = x.view(1, 1, *(16,) if "1d" in name else (4, 4) if "2d" in name else (1, 4, 4))
        x = x.view(2, 2, 4) if name == "dsplit" else x * 1j if name in ("imag", "conj") else x
        if not hasattr(x, name):
            return getattr(torch, name, getattr(nnf, name, None))(x, *UNARY.get(name, ()))
        member = getattr(x, name)
        return member(*UNARY.get(name, ())) if callable(member) else member

    return call


def into(x: Tensor, key: Any, value: Any) -> Tensor:
    x = x.clone()
    x[key] = value
    return x


# Each on as many tensors of 4 × 4; those after a "?" are int64 indices, after a "!" masks.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: unary(name) for name, signature in LINEAR.items()
       if signature == ["input+"] and name not in ("getitem", "zero", "deepcopy")},
    "getitem": lambda x: x[1:, 2], "getitem ?": lambda x, i: x[i],
    "gather ?": lambda x, i: x.gather(0, i),
    "add": lambda x, y: x + y, "add 1": lambda x: x + 1, "add 0": lambda x: 0 + x,
    "add 1j": lambda x: x + 1j, "mul 1j": lambda x: 1j * x,
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "add other": lambda x, y: torch.add(x, other=y),
    "add in place": lambda x, y: x.clone().add_(y),
    "sub": lambda x, y: x - y, "sub from 1": lambda x: 1 - x,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp 3": torch.lerp,
    "mul": lambda x, y: x * y, "mul 3": lambda x: 3 * x, "mul mask !": lambda x, m: x * m,
    "div": lambda x, y: x / y, "div 3": lambda x: x / 3, "rdiv": lambda x: 1 / x,
    "div floor": lambda x: torch.div(x, 3, rounding_mode="floor"), "floordiv": lambda x: x // 3,
    **{name: lambda x, y, name=name: getattr(torch, name)([x, y])
       for name in ("cat", "concat", "stack", "hstack", "vstack", "dstack")},
    **{name: lambda x, y, name=name: getattr(torch, name)(x, y)
       for name in ("matmul", "mm", "kron")},
    "bmm": lambda x, y: torch.bmm(x[None], y[None]), "mv": lambda x, y: torch.mv(x, y[0]),
    "dot": lambda x, y: torch.dot(x[0], y[0]), "inner": torch.inner,
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "einsum": lambda x, y: torch.einsum("ij,jk->k", x, y),
    "einsum of three": lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "linear": lambda x, y: nnf.linear(x, y),
    "linear bias": lambda x, y, z: nnf.linear(x, y, bias=z[0]),
    "linear one": lambda x: nnf.linear(x, x, x[0]),
    **{f"conv{d}d": lambda x, y, z, d=d: getattr(nnf, f"conv{d}d")(
        x.view(1, 1, *[1] * (d - 1), 16), y.view(1, 1, *[1] * (d - 1), 16), z[0, :1], padding=2)
       for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": lambda x, y, z, d=d: getattr(nnf, f"conv_transpose{d}d")(
        x.view(1, 1, *[1] * (d - 1), 16), y.view(1, 1, *[1] * (d - 1), 16), z[0, :1])
       for d in (1, 2, 3)},
    "conv without bias": lambda x, y: nnf.conv1d(x[None], y[..., None]),
    "bilinear": lambda x, y, z: nnf.bilinear(x, y, z[None]),
    "embedding": lambda x: nnf.embedding(ROW, x), "embedding ?": lambda x, i: nnf.embedding(i, x),
    "addmm": torch.addmm, "addmm mat2": lambda x, y, z: torch.addmm(x, mat1=y, mat2=z, beta=2),
    "addbmm": lambda x, y, z: torch.addbmm(x, y[None], z[None]),
    "baddbmm": lambda x, y, z: torch.baddbmm(x[None], y[None], z[None]),
    "addmv": lambda x, y, z: torch.addmv(x[0], y, z[0]),
    "addr": lambda x, y, z: torch.addr(x, y[0], z[0]),
    "addcmul": torch.addcmul, "addcdiv": torch.addcdiv,
    "where": lambda x, y: torch.where(MASK, x, y), "where 0": lambda x: x.where(MASK, 0.0),
    "where 1": lambda x: torch.where(MASK, x, 1.0), "where !": lambda x, y, m: x.where(m, y),
    "masked_fill": lambda x: x.masked_fill(MASK, 0),
    "masked_fill 1": lambda x: x.masked_fill(MASK, 1),
    "masked_fill -inf": lambda x: x.masked_fill(MASK, value=-9.0),
    "masked_fill !": lambda x, m: x.masked_fill(m, 0.0),
    "masked_scatter": lambda x, y: x.masked_scatter(MASK, y),
    "pad": lambda x: nnf.pad(x, (1, 0)), "pad 1": lambda x: nnf.pad(x, (1, 0), "constant", 1.0),
    "pad value": lambda x: nnf.pad(x, (1, 0), value=2.0),
    "setitem": lambda x, y: into(x, ROW, y[:2]), "setitem 0": lambda x: into(x, 1, 0.0),
    "setitem 1": lambda x: into(x, 1, 1.0),
    "index_add": lambda x, y: x.index_add(0, ROW, y[:2]),
    "index_add source": lambda x, y: x.index_add(0, ROW, source=y[:2]),
    "index_copy": lambda x, y: x.index_copy(0, ROW, y[:2]),
    "scatter_add": lambda x, y: x.scatter_add(0, INDEX, y[:1]),
    "scatter_add ?": lambda x, y, i: x.scatter_add(0, i, y),
    "index_fill": lambda x: x.index_fill(0, ROW, 0.0),
    "index_fill 1": lambda x: x.index_fill(0, ROW, 1),
    "index_put": lambda x, y: x.index_put((ROW,), y[:2]),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[0], 0, 1),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 3),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y[0]),
    "zero": lambda x: x.clone().zero_(), "deepcopy": lambda x: copy.deepcopy(x),
    "copy": lambda x, y: x.clone().copy_(y),
    "to int": lambda x: (9 * x).to(torch.int64),
    "sum int": lambda x: (9 * x).sum(dtype=torch.int64),
    "sum keepdim": lambda x: x.sum(0, keepdim=True), "mean dim": lambda x: x.mean(-1),
    **{name: lambda x, name=name: getattr(torch, name)(x) for name in (
        "relu", "exp", "abs", "square", "tanh", "sigmoid", "sign", "round", "reciprocal", "erf",
        "norm", "var", "std", "prod", "max", "min", "amax", "argmax", "median", "sort"
    )},
    "gelu": lambda x: nnf.gelu(x), "softmax": lambda x: x.softmax(-1),
    "cumprod": lambda x: x.cumprod(0), "pow": lambda x: x**2,
    "rpow": lambda x: 2**x, "clamp": lambda x: x.clamp(min=0), "maximum": torch.maximum,
    "layer_norm": lambda x: nnf.layer_norm(x, (4,)), "mse_loss": lambda x, y: nnf.mse_loss(x, y),
    "comparison": lambda x: x > 0,
}


def arguments(name: str, letters: tuple[str, ...], random: torch.Generator) -> list[list[Tensor]]:
    """Of each of two ranks."""
    kinds = ["float"] * len(letters)
    if name.endswith(("?", "!")):
        kinds[-1] = name[-1]
    ranks: list[list[Tensor]] = [[], []]
    for letter, kind in zip(letters, kinds, strict=True):
        values = (torch.randint(4, (2, *S), generator=random) if kind == "?"
                  else torch.rand(2, *S, generator=random) < 0.5 if kind == "!"
                  else torch.randn(2, *S, generator=random, dtype=torch.float64) + 0.1)
        for rank in range(2):
            ranks[rank].append(values[rank if letter in "VP" else 0])
    return ranks


def numbers(made: Any) -> Tensor:
    return torch.cat([torch.as_tensor(x).flatten().to(torch.complex128) for x in tree_leaves(made)])


def adds_up(fn: Callable[..., Any], letters: tuple[str, ...], ranks: list[list[Tensor]]) -> bool:
    """Is the sum of what `fn` makes of two ranks' arguments what it makes of the sums, whichever
    rank's varying arguments meet them?"""
    total = numbers(fn(*ranks[0])) + numbers(fn(*ranks[1]))
    for one in ranks:
        whole = [a + b if letter == "P" else mine
                 for letter, a, b, mine in zip(letters, *ranks, one, strict=True)]
        other = numbers(fn(*whole))
        if other.shape != total.shape or not torch.allclose(total, other, rtol=0.02, atol=0.02):
            return False
    return True


def count(name: str, fn: Callable[..., Any]) -> int:
    """Of the tensors that it takes."""
    code = getattr(fn, "__code__", None)
    if code:
        return code.co_argcount - len(fn.__defaults__ or ())
    return {"lerp": 3, "addmm": 3, "addcmul": 3, "addcdiv": 3}.get(fn.__name__, 2)


def test_every_linear_operation_is_tried() -> None:
    assert set(LINEAR) <= {name.split()[0] for name in OPERATIONS}


@pytest.mark.parametrize("name", OPERATIONS)
def test_partial_passes_where_numbers_add_up_and_nowhere_else(name: str) -> None:
    fn, random = OPERATIONS[name], torch.Generator().manual_seed(1)
    kinds = ["RVP"] * count(name, fn)
    if name.endswith(("?", "!")):
        kinds[-1] = "RV"
    cases = [(letters, arguments(name, letters, random)) for letters in itertools.product(*kinds)]

    def found(comm: dtlab.Comm) -> list[str]:
        def step(comm: dtlab.Comm, letters: tuple[str, ...], *args: Tensor) -> None:
            for x, letter in zip(args, letters, strict=True):
                types.declare(x, comm, letter)
            made.append(fn(*args))

        seen, made = list[str](), list[Any]()
        for letters, ranks in cases:
            try:
                types.check(step, comm, letters, *ranks[comm.rank], device="cpu")
                x = next((x for x in tree_leaves(made.pop()) if isinstance(x, Tensor)), None)
                seen.append("R" if x is None else types.known_letters[x].get("ranks", "R"))
            except dtlab.TypeMismatch:
                seen.append("refused")
        return seen

    said = on("simulator", found, ranks=2).values
    assert said[0] == said[1]
    for (letters, ranks), letter in zip(cases, said[0], strict=True):
        if name == "copy":
            assert letter == letters[1]  # whatever it writes over
        elif "P" in letters:
            assert letter == ("P" if adds_up(fn, letters, ranks) else "refused"), letters
        else:
            assert letter == max(letters), letters  # V if there is one, else R


@pytest.mark.parametrize("name", ["add", "mul", "matmul", "cat", "where", "linear bias", "addmm"])
def test_what_is_invariant_meets_what_leaves_its_gradient_the_same_on_all_ranks(name: str) -> None:
    """What is made of Invariants only is used alike on all ranks; other results are not."""
    fn, random = OPERATIONS[name], torch.Generator().manual_seed(1)
    for letters in itertools.product("IRV", repeat=count(name, fn)):
        ranks = [[x.requires_grad_() for x in args] for args in arguments(name, letters, random)]
        gradients: list[list[Tensor]] = []
        for rank, args in enumerate(ranks):
            y = fn(*args)
            random.manual_seed(rank * (set(letters) != {"I"}))
            use = torch.randn(y.shape, generator=random, dtype=y.dtype)
            invariant = [x for x, letter in zip(args, letters, strict=True) if letter == "I"]
            gradients.append(list(torch.autograd.grad(y, invariant, use)) if invariant else [])

        def step(comm: dtlab.Comm, *mine: Tensor, letters: Any = letters) -> None:
            for x, letter in zip(mine, letters, strict=True):
                types.declare(x, comm, letter)
            fn(*mine)

        def found(comm: dtlab.Comm, step: Any = step, ranks: Any = ranks) -> bool:
            try:
                types.check(step, comm, *ranks[comm.rank], device="cpu")
            except dtlab.TypeMismatch:
                return False
            return True

        equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        assert on("simulator", found, ranks=2).values == [equal, equal], letters
