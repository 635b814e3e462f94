"""Checks of the arguments of a worker's calls, before a request is sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from dtlab.checks import check_whole, is_real, is_whole, short
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.ps.partition import Key, MetaSpec, Spec, has_data
from dtlab.ps.slices import Slices
from dtlab.reduction import not_dense

MOST = 1e18  # torch takes no larger factor


def specs_of(rank: int, tensors: Mapping[Key, torch.Tensor], tables: frozenset[Key],
          known_already: dict[Key, Spec]) -> dict[Key, Spec]:
    """Return the specs of what `init` is given. Raises `ConfigError` for what can't be kept."""
    check_mapping(rank, "init", tensors)
    for key in tables - tensors.keys():
        raise ConfigError(f"rank {rank}: init has no tensor for the table {key!r}")
    found = {}
    for key, x in tensors.items():
        if key != key or " at 0x" in repr(key):  # NaN, or a place in this process's memory
            raise ConfigError(f"rank {rank}: init's key {short(key)} is another one in another "
                              f"process; take a name, a number, or a tuple of such")
        if key in known_already:
            raise ConfigError(f"rank {rank}: the key {key!r} is there already; init makes new keys")
        if not isinstance(x, torch.Tensor) or not_dense(x):
            raise ConfigError(f"rank {rank}: init of {key!r} takes a dense tensor, not {_kind(x)}")
        if key in tables and x.ndim < 1:
            raise ConfigError(f"rank {rank}: a table has rows, and {key!r} is a single number")
        if key in tables and 0 in x.shape[1:]:
            raise ConfigError(f"rank {rank}: the rows of the table {key!r}, {tuple(x.shape)}, have "
                              f"no elements")
        kind = MetaSpec if x.is_meta else Spec
        found[key] = kind(tuple(x.shape), x.dtype, key in tables)
    kinds = {type(spec): key for key, spec in (known_already | found).items()}
    if len(kinds) > 1:
        raise ConfigError(f"rank {rank}: the key {kinds[MetaSpec]!r} has no data (device "
                          f'"meta"), {kinds[Spec]!r} has; make all keys of one kind')
    return found


def spec_of(rank: int, key: Key, specs: Mapping[Key, Spec]) -> Spec:
    """The key's spec, or `ConfigError`."""
    if not isinstance(key, Hashable) or key not in specs:
        names = ", ".join(repr(name) for name in list(specs)[:8]) or "none yet"
        more = ", …" if len(specs) > 8 else ""
        raise ConfigError(f"rank {rank}: unknown key {short(key)}; init has made: {names}{more}")
    return specs[key]


def key_list(rank: int, keys: Iterable[Key], verb: str = "pull") -> list[Key]:
    """The keys of a pull. A single string is a likely slip."""
    if isinstance(keys, str):
        shown = f"{verb}([{short(keys)}])" if verb.isidentifier() else f"[{short(keys)}]"
        raise ConfigError(f"rank {rank}: {verb} takes a list of keys: {shown}")
    try:
        return list(dict.fromkeys(keys))
    except TypeError:  # no keys, or such as can't be
        raise ConfigError(f"rank {rank}: {verb} takes a list of keys, not {short(keys)}") from None


def check_mapping(rank: int, verb: str, tensors: object) -> None:
    """Raise `ConfigError` unless it is a dict, or another mapping, of key → tensor."""
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"rank {rank}: {verb} takes a dict of key → tensor, not {short(tensors)}")


def check_fit(rank: int, verb: str, key: Key, x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return `x`; raise `ShapeMismatch` if it is not of the key's shape and dtype."""
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"rank {rank}: {verb} of {key!r} takes a tensor, not {_kind(x)}")
    if x.is_meta == has_data([spec]):
        raise ShapeMismatch(f"rank {rank}: {verb} of {key!r} {_DATA[not x.is_meta]}; init made it "
                            f"{_DATA[has_data([spec])]}")
    if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
        raise ShapeMismatch(f"rank {rank}: {verb} of {key!r} with {x.dtype} {tuple(x.shape)}; "
                            f"init made it with {spec.dtype} {spec.shape}")
    return x


def check_table(rank: int, key: Key, spec: Spec) -> None:
    """Raise `ConfigError` unless the key's rows can be had one by one."""
    if not spec.table:
        raise ConfigError(f"rank {rank}: {key!r} is no table; to pull and push single rows, "
                          f"make it with init(..., tables=[{key!r}])")


def table_rows(rank: int, key: Key, index: torch.Tensor | Sequence[int],
         specs: Mapping[Key, Spec]) -> tuple[Spec, torch.Tensor]:
    """The table's spec and the rows as int64, or `ConfigError`."""
    spec = spec_of(rank, key, specs)
    check_table(rank, key, spec)
    try:
        index = index if isinstance(index, torch.Tensor) else torch.tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # no numbers, or none of 64 bits
        raise ConfigError(f"rank {rank}: rows are whole numbers, not {short(index)}") from None
    if index.ndim != 1:
        raise ConfigError(f"rank {rank}: rows are numbers in one dimension, not in a shape of "
                          f"{tuple(index.shape)}; flatten them")
    if len(index) and index.dtype in (torch.bool, *_INEXACT):
        raise ConfigError(f"rank {rank}: rows are whole numbers, not {index.dtype}")
    index = index.to(torch.int64)
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < spec.units):
        raise ConfigError(f"rank {rank}: {key!r} has the rows 0 to {spec.units - 1}; asked for "
                          f"{int(index.min())} to {int(index.max())}")
    return spec, index


def check_dtypes(rank: int, given: Mapping[int, Slices], tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` unless a server can scale all that a push hands in, as a mean does.

    tensors: all that shall be sent.
    """
    if not {x.dtype for x in tensors} <= _INEXACT:
        key, x = next((key, x) for found in given.values() for each in found
                      for key, x in each.tensors() if x.dtype not in _INEXACT)
        raise ConfigError(f"rank {rank}: push of {key!r} with {x.dtype}, of which servers can't "
                          f"make a mean; make the key with torch.float32, or only pull it")


def keys_with_nan(rank: int, given: Mapping[int, Slices], tensors: Iterable[torch.Tensor],
        policy: str) -> frozenset[Key]:
    """The keys of a push whose gradients hold NaN; `ConfigError` if the policy is to "raise".

    tensors: all that shall be sent. One pass over them: a sum is NaN if any element is.
    """
    if not any(map(_has_nan, tensors)):
        return frozenset()
    bad = {key: None for found in given.values() for each in found
           for key, x in each.tensors() if _has_nan(x)}
    if bad and policy == "raise":
        raise ConfigError(f"rank {rank}: the gradient of {next(iter(bad))!r} holds NaN; "
                          f'join(nan="drop") leaves such out, join(nan="pass") lets them through')
    return frozenset(bad)


def _has_nan(x: torch.Tensor) -> bool:
    if x.is_meta or not (x.is_floating_point() or x.is_complex()):
        return False
    total = x.sum().item()
    return total != total and bool(x.isnan().any())  # NaN alone is unlike itself


def chosen_servers(servers: Any, all_servers: Sequence[int]) -> tuple[int, ...]:
    """The servers that shall hold keys, ascending."""
    ranks: Iterable[int] = ()
    if is_whole(servers):
        number = int(servers)
        ranks = all_servers[:number] if 0 < number <= len(all_servers) else ()
    elif isinstance(servers, (Sequence, Set)) and not isinstance(servers, (str, bytes)):
        ranks = list(servers)
    if not ranks or any(not is_whole(rank) or rank not in all_servers for rank in ranks):
        raise ConfigError(f"the servers that hold keys must be some of the ranks "
                          f"{', '.join(map(str, all_servers))}, not {short(servers)}")
    return tuple(sorted({int(rank) for rank in ranks}))


def count(what: str, value: object, least: int) -> int:
    """Return `value` as a whole number, `least` or more."""
    check_whole(what, value, least)
    return int(value)  # type: ignore[call-overload, no-any-return]


def amount(what: str, value: Any, above: bool = True, most: float = MOST) -> float:
    """Return `value` as a float, above 0 or at least 0, and below `most`."""
    if not is_real(value) or not 0 <= value < most or (above and value == 0):
        least = "above 0" if above else "0 or more"
        ends = "finite" if most == MOST else f"below {most:g}"
        raise ConfigError(f"{what} is a number, {least} and {ends}, not {short(value)}")
    return float(value)


_INEXACT = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
            torch.complex128}
_DATA = {True: "with data", False: 'without data (device "meta")'}


def _kind(x: object) -> str:
    return not_dense(x) if isinstance(x, torch.Tensor) else type(x).__name__
