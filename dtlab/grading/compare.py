"""Differences between actual and wanted values; fingerprints, to compare results of two answers."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.grading.case import ANY
from dtlab.grading.frames import Opaque

Difference = tuple[str, str]  # the actual value, the wanted value


def difference(name: str, actual: Any, wanted: Any, rtol: float = 0.0) -> Difference | None:
    """Describe the first place in which `actual` differs from `wanted`; None if there is none. A
    list equals a tuple of the same items. rtol: the largest error of floats, relative to the
    largest in their tensor."""
    if wanted is ANY:
        return None
    if isinstance(wanted, torch.Tensor):
        return _tensor_difference(name, actual, wanted, rtol)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(wanted):
            text = repr(wanted)
            return _says(name, actual), text if len(text) <= 40 else f"{len(wanted)} values"
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(actual, wanted, strict=True))]
    elif isinstance(wanted, dict):
        if not isinstance(actual, dict) or set(actual) != set(wanted):
            return _says(name, actual), f"a dictionary of {', '.join(map(str, wanted))}"[:80]
        pairs = [(f"{name}[{key!r}]", actual[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, float) and type(actual) in (int, float):
        close = math.isclose(actual, wanted, rel_tol=max(rtol, 1e-12), abs_tol=1e-12)
        return None if close else (f"{name} = {_digits(actual, wanted)}", _digits(wanted, actual))
    else:
        same = type(actual) is type(wanted) and actual == wanted
        return None if same else (_says(name, actual), f"{wanted!r:.60}")
    return next((wrong for pair in pairs if (wrong := difference(*pair, rtol))), None)


def _tensor_difference(name: str, actual: Any, wanted: torch.Tensor, rtol: float
                       ) -> Difference | None:
    if not isinstance(actual, torch.Tensor):
        kind = "no dense tensor" if isinstance(actual, Opaque) else type(actual).__name__
        return f"{name} is {kind}", "a tensor"
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        return f"{name}: {_kind(actual)}", _kind(wanted)
    wrong = actual != wanted
    if rtol and wanted.numel():
        most = wanted.abs().max().double()
        wrong &= ~((actual.double() - wanted.double()).abs() <= rtol * most.clamp(min=1e-30))
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    x, y = actual[at].item(), wanted[at].item()
    return f"{place} = {_digits(x, y)}", _digits(y, x)


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _says(name: str, actual: Any) -> str:
    is_all = re.fullmatch(r"result|rank \d+", name)
    return f"{name} {'returned' if is_all else '='} {actual!r}"[:80]


def _digits(x: Any, other: Any) -> str:
    """Return `x`, with as many digits as it takes to see that it is not `other`."""
    texts = ((f"{x:.{n}g}", f"{other:.{n}g}") for n in (6, 9, 17))
    return next((mine for mine, theirs in texts if mine != theirs), f"{x:g}")


# ---- fingerprints -------------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """A short summary of a verdict's evidence. Equal evidence has equal fingerprints, up to
    rounding; different evidence has so only by chance."""

    kind: str  # a hash of all that is no number: texts, lengths, shapes
    sums: tuple[float, float]  # two weighted sums of all numbers
    amount: float  # the sum of their absolute values
    rtol: float  # the error that rounding may cause
    sent: str = ""  # a hash of the bytes that each rank has sent

    def matches(self, other: Fingerprint) -> bool:
        """Are the two of the same evidence? What was sent does not count."""
        tolerance = max(self.rtol, other.rtol) * (self.amount + other.amount) + 1e-12
        return self.kind == other.kind and all(
            abs(a - b) <= tolerance for a, b in zip(self.sums, other.sums, strict=True))


_MOST_NUMBERS = 1 << 25  # later tensors don't count; two of the course's largest vectors fit
_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_IRRATIONAL = 5**0.5 / 2, 2**0.5  # the fractional parts of their multiples are the weights


def fingerprint(tree: Any, sent: Sequence[int] = ()) -> Fingerprint:
    """Fingerprint numbers, texts, tensors, and collections of them. sent: bytes, by rank."""
    words: list[str] = []
    numbers: list[np.ndarray[Any, Any]] = [np.zeros(0)]
    rtol, remaining = 1e-7, _MOST_NUMBERS
    for leaf in _leaves(tree):
        if isinstance(leaf, torch.Tensor):
            words.append(f"{leaf.dtype} {tuple(leaf.shape)}")
            remaining -= leaf.numel()
            if remaining >= 0:
                numbers.append(_real(leaf))
            rtol = max(rtol, _ROUNDING.get(leaf.dtype, 0.0))
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            words.append("number")
            huge = isinstance(leaf, int) and abs(leaf) > sys.float_info.max
            numbers.append(np.array([math.inf if huge else float(leaf)]))
        else:
            words.append(str(leaf))
    values = np.concatenate(numbers)
    not_finite = ~np.isfinite(values)
    words.append(str(np.flatnonzero(not_finite)[:100].tolist()))
    values[not_finite] = 0.0
    places = np.arange(1, len(values) + 1)
    first, second = (float((values * (places * number % 1)).sum()) for number in _IRRATIONAL)
    return Fingerprint(_hash("\n".join(words)), (first, second), float(np.abs(values).sum()), rtol,
                       _hash(str(sent)))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()


def _real(x: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return flat.detach().to(torch.float64).reshape(-1).numpy()


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the values in `tree`, and a word for each collection, the same for lists and tuples."""
    if isinstance(tree, dict):
        yield f"dictionary of {len(tree)}"
        for key, value in tree.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        yield f"list of {len(tree)}"
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
