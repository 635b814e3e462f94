"""Reductions of every dtype that torch has: computed, or refused in one sentence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, collectives, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.reduction import combine_, identity
from dtlab.topology import uniform
from tests import oracle

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPUTED = {*oracle.DTYPES, *FLOAT8, *UNSIGNED, torch.complex32}
OPS = ("sum", "prod", "max", "min")
REDUCING = [(c, a) for c in oracle.REDUCING for a in ALGORITHMS[c]]
# What ranks 0 to 2 hold: all results and partial results, means too, are exact in 8 bits.
HELD = torch.tensor([[1, -1, 2], [3, -1, 2], [2, -4, 2]])


def every_dtype() -> list[torch.dtype]:
    """Those of which torch can make a dense tensor, be it only to hold its bits."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((d for d in found if not torch.empty(0, dtype=d).is_quantized), key=str)


def held(dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that `dtype` holds, of both signs where there are signs."""
    if dtype == torch.bool:
        return (HELD > 1).long()
    with_signs = dtype.is_signed and not dtype.is_complex  # whose products would hold −0
    return HELD if with_signs else HELD.abs()


def reduced(comm: Comm, collective: str, algorithm: str, op: str, dtype: torch.dtype) -> Any:
    x = held(dtype)[comm.rank].to(dtype) if dtype in COMPUTED else torch.empty(3, dtype=dtype)
    x = x.expand(3, 3) if collective == "reduce_scatter" else x
    return getattr(collectives, collective)(comm, x, op=op, algorithm=algorithm)


@pytest.mark.parametrize("dtype", every_dtype(), ids=str)
def test_every_dtype_is_computed_or_refused_in_one_sentence(dtype: torch.dtype) -> None:
    for op in oracle.OPS:
        defined = dtype in COMPUTED and oracle.is_defined(op, dtype)
        for collective, algorithm in REDUCING:
            asked = reduced, collective, algorithm, op, dtype
            if not defined:
                says = f"'{op}' (is not defined for|of) {dtype}"
                with pytest.raises(dtlab.ConfigError, match=says):
                    simulate(*asked, network=uniform(3, 1e-6, 1e9))
                continue
            values = simulate(*asked, network=uniform(3, 1e-6, 1e9)).values
            parts = list(held(dtype))
            wanted = oracle.expected(collective, parts, 0, op, [x.expand(3, 3) for x in parts])
            first = collective == "exscan"  # rank 0 gets what changes nothing: see below
            for got, want in zip(values[first:], wanted[first:], strict=True):
                assert got.dtype == dtype
                assert torch.equal(got.view(torch.uint8), want.to(dtype).view(torch.uint8)), asked


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_numbers_are_combined_as_python_does_it_up_to_their_width(
    dtype: torch.dtype
) -> None:
    most = 1 << 8 * dtype.itemsize
    draw = random.Random(1)
    pairs = [(draw.randrange(most), draw.randrange(most)) for _ in range(50)]
    pairs += [(most - 1, 0), (most // 2, most // 2 - 1), (most - 1, most - 1)]
    rules = {"sum": lambda a, b: (a + b) % most, "prod": lambda a, b: a * b % most,
             "max": max, "min": min}
    for op, rule in rules.items():
        into, x = (torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))
        assert combine_(into, x, op).tolist() == [rule(a, b) for a, b in pairs]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_eight_bit_floats_are_combined_and_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    numbers = torch.linspace(-5, 5, 41).to(dtype)
    a, b = (x.flatten() for x in torch.meshgrid(numbers.float(), numbers.float(), indexing="ij"))
    for op, combined in (("sum", a + b), ("prod", a * b), ("max", torch.maximum(a, b)),
                         ("min", torch.minimum(a, b)), ("avg", a + b)):
        into = combine_(a.to(dtype), b.to(dtype), op)
        assert torch.equal(into.float(), combined.to(dtype).float())


@pytest.mark.parametrize("dtype", sorted(COMPUTED, key=str), ids=str)
def test_the_identity_of_an_op_changes_nothing(dtype: torch.dtype) -> None:
    for op in OPS:
        if oracle.is_defined(op, dtype):
            x = held(dtype).to(dtype)
            unchanged = combine_(identity(torch.empty_like(x), op), x, op)
            assert torch.equal(unchanged.view(torch.uint8), x.view(torch.uint8)), op


@pytest.mark.parametrize("dtype", [d for d in every_dtype() if d in COMPUTED], ids=str)
def test_collectives_that_only_move_take_every_dtype(dtype: torch.dtype) -> None:
    moving = ((c, a) for c, a in oracle.MOVING if c not in oracle.REDUCING)
    for collective, algorithm in moving:
        def fn(comm: Comm, collective: str = collective, algorithm: str = algorithm) -> Any:
            return oracle.call(comm, collective, algorithm, HELD[comm.rank].to(dtype), 2,
                               pieces=HELD.to(dtype))

        (wanted,) = oracle.expected(collective, list(HELD), 2, pieces=[HELD] * 3)[2:]
        got = simulate(fn, network=uniform(3, 1e-6, 1e9)).values[2]
        assert torch.equal(got.view(torch.uint8), wanted.to(dtype).view(torch.uint8)), collective


@pytest.mark.parametrize(("collective", "algorithm"),
                         [(c, a) for c, a in oracle.MOVING if c not in ("scan", "exscan")])
def test_what_is_only_read_may_be_expanded(collective: str, algorithm: str) -> None:
    def fn(comm: Comm) -> Any:
        one = torch.tensor([comm.rank + 1.0])
        reads = {"broadcast": comm.rank == 0, "reduce": comm.rank != 0, "all_reduce": False}
        x = one.expand(4) if reads.get(collective, True) else one.repeat(4)
        return oracle.call(comm, collective, algorithm, x, pieces=one.expand(comm.size, 4))

    parts = [torch.full((4,), rank + 1.0) for rank in range(5)]
    wanted = oracle.expected(collective, parts, pieces=[part.expand(5, 4) for part in parts])
    assert torch.equal(simulate(fn, network=uniform(5, 1e-6, 1e9)).values[0], wanted[0])
