"""Checks of arguments: numbers, names, flags, and what a communicator is given."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any, TypeGuard

from dtlab.errors import ConfigError


def is_whole(value: object) -> TypeGuard[int]:
    """An int, or NumPy's, but no bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)  # int first: quick


def is_real(value: object) -> TypeGuard[float]:
    """A number of any kind that can be compared, infinity and nan too, but no bool."""
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 1, most: int = 2**63 - 1) -> None:
    """Raise `ConfigError` unless `value` is a whole number, `least` to `most`."""
    if not is_whole(value) or int(value) < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more, not {short(value)}")
    if int(value) > most:
        raise ConfigError(f"{name} must be {most:,} or less, not {short(value)}")


def check_number(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a real number; infinity is one, nan is not."""
    if not is_real(value) or value != value:
        raise ConfigError(f"{name} must be a number, not {short(value)}")


def check_amount(name: str, value: object, unit: str = "") -> None:
    """Raise `ConfigError` unless `value` is a number, 0 or more, and finite."""
    check_number(name, value)
    if not 0 <= _float(value) < math.inf:
        raise ConfigError(f"{name} must be 0{unit} or more, and finite, not {short(value)}")


def check_positive(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a number above 0, and finite."""
    check_number(name, value)
    if not 0 < _float(value) < math.inf:
        raise ConfigError(f"{name} must be a number above 0, and finite, not {short(value)}")


def check_each(check: Callable[..., None], *limits: Any, **values: Any) -> None:
    """Check all `values`, by name: `check(name, value, *limits)` of each."""
    for name, value in values.items():
        check(name, value, *limits)


def _float(value: Any) -> float:
    """A real number; infinity if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_members(ranks: Any, rank: int, size: int) -> tuple[int, ...]:
    """Return `ranks`, which must be different ones of `size`, with `rank`; else `ConfigError`."""
    try:
        members = tuple(ranks)
    except TypeError:  # a single number
        members = (ranks,)
    plain = {*map(type, members)} == {int} and min(members) >= 0 and max(members) < size  # quick
    for member in () if plain else members:
        if not is_whole(member) or member not in range(size):
            raise ConfigError(f"rank {rank}: a subgroup can't hold {member!r}; the ranks here are "
                              f"0 to {size - 1}")
    if len(set(members)) < len(members):
        raise ConfigError(f"rank {rank}: subgroup {list(members)} names a rank twice")
    if rank not in members:
        raise ConfigError(f"rank {rank} is not in the subgroup {list(members)}; only its own ranks "
                          f"call subgroup")
    return members


def no_operation(rank: int, op: object) -> ConfigError:
    """The error of `Comm.post` and `Comm.exchange` for what is neither a `Send` nor a `Recv`."""
    return ConfigError(f"rank {rank}: post and exchange take one or more of Send(x, dst) and "
                       f"Recv(x, src), not {short(op)}")


def check_wait(rank: int, works: object, kind: type, timeout_s: object) -> None:
    """Raise `ConfigError` unless `Comm.wait_any` can wait for `works`, which are of this kind."""
    if not isinstance(works, Collection) or not all(issubclass(type_, kind)
                                                    for type_ in {*map(type, works)}):
        raise ConfigError(f"rank {rank}: wait_any takes a list of what isend, irecv, post and "
                          f"begin return, not {short(works)}")
    if timeout_s is not None:
        check_amount(f"rank {rank}: the seconds of wait_any", timeout_s)
    elif not works:
        raise ConfigError(f"rank {rank}: wait_any was given nothing to wait for")


def check_split(color: Any, key: Any, rank: int) -> None:
    """Raise `ConfigError` unless `Comm.split` can tell colors apart, and sort keys."""
    if color is not None and not isinstance(color, (Integral, str)):
        raise ConfigError(f"rank {rank}: split's color is an int, or None, not {color!r}")
    check_number(f"rank {rank}: split's key", key)


def check_name(what: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a text."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be a name, not {short(value)}")


def check_choice(what: str, value: object, known: Collection[str], otherwise: str = "") -> None:
    """Raise `ConfigError` unless `value` is one of the names `known` of what there is. otherwise:
    the end of the message, such as ", or a function"."""
    if isinstance(value, str) and value in known:
        return
    near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f" did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no {what} {short(value)};{hint} choose one of {', '.join(known)}"
                      f"{otherwise}")


def check_flag(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {short(value)}")


def short(value: Any, most: int = 30) -> str:
    """Return `value` as a message shows it: one line of at most `most` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4,300 digits
        return "so large a number" if isinstance(value, Integral) else f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
