"""The registry: every collective, every algorithm, by name.

The command line, the plots, the tests and the grader all read it; a new algorithm is one new
function under `@algorithm(...)`, and its closed form in `dtlab.cost`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch.overrides import handle_torch_function, has_torch_function

from dtlab import cost
from dtlab.checks import check_choice, check_whole, is_whole
from dtlab.comm import Comm
from dtlab.errors import ConfigError, ShapeMismatch
from dtlab.reduction import FOREIGN, named_op, not_dense, overlaps_itself, span_bytes

COLLECTIVES = ("broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter",
               "all_reduce", "all_to_all", "scan", "exscan", "barrier")
# What callers use: functions with the signature of their collective, less `algorithm`. They check
# their arguments, take tensors of any shape, and label their messages.
ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in COLLECTIVES}
# The algorithms themselves, which take vectors, and rows of them.
IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in COLLECTIVES}
# What an algorithm may be given besides its options.
_COMMON = ("comm", "x", "rows", "received", "root", "op")
# The collectives themselves, once all are defined.
_collectives: dict[str, Callable[..., Any]] = {}
Function = TypeVar("Function", bound=Callable[..., Any])
Rows = torch.Tensor | Sequence[torch.Tensor]  # a row for each rank


def algorithm(collective: str, name: str) -> Callable[[Function], Function]:
    """Register the decorated function: `ALGORITHMS[collective][name]` calls it with checks.

    It takes what the other algorithms of its collective take, see `IMPLEMENTATIONS`; what it has
    beyond that are options, by name. Raises `ConfigError` for an unknown collective, and for a
    function that can't be called so.
    """

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def checked(comm: Comm, *args: Any, **options: Any) -> Any:
            return _collectives[collective](comm, *args, algorithm=name, **options)

        if _collectives:  # not one of the package's own
            _check_fits(collective, name, function)
            _sign(checked, collective)
        cost.forget()
        IMPLEMENTATIONS[collective][name] = function
        ALGORITHMS[collective][name] = checked
        return function

    return register


def publish(collectives: dict[str, Any]) -> None:
    """Let the functions in `ALGORITHMS` call the collectives, now all there, and look like them."""
    for collective, algorithms in ALGORITHMS.items():
        collectives[collective] = overridable(collectives[collective])
        _collectives[collective] = collectives[collective]
        for function in algorithms.values():
            _sign(function, collective)


def overridable(function: Function) -> Function:
    """Return `function(comm, *args)`, which torch's function modes see as they see torch's own
    functions."""

    @functools.wraps(function)
    def call(comm: Comm, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # that would trace how messages are sent
            return uncompiled(comm, *args, **options)
        check_comm(comm, f"{function.__name__}(comm, …)")
        if "op" in options:
            options["op"] = named_op(options["op"])
        elif not FOREIGN.isdisjoint(map(type, args)):
            args = tuple(named_op(arg) if type(arg) in FOREIGN else arg for arg in args)
        if has_torch_function((*args, *options.values())):
            return handle_torch_function(call, (*args, *options.values()), comm, *args, **options)
        return function(comm, *args, **options)

    uncompiled = torch._disable_dynamo(call)
    return cast(Function, call)


def _sign(function: Any, collective: str) -> None:
    """Give `function` the signature of its collective, less `algorithm`."""
    whole = inspect.signature(_collectives[collective])
    kept = [p for name, p in whole.parameters.items() if name != "algorithm"]
    function.__signature__ = whole.replace(parameters=kept)


def _check_fits(collective: str, name: str, function: Callable[..., Any]) -> None:
    """Raise `ConfigError` unless its collective can call `function`."""
    check_choice("collective", collective, IMPLEMENTATIONS)
    if not isinstance(name, str) or name == "auto":
        raise ConfigError(f"an algorithm of {collective} can't be called {name!r}; "
                          f"give it a name of its own")
    given = _given(collective)
    try:
        inspect.signature(function).bind(*given)
    except TypeError as misfit:
        defined = repr(function)
        if callable(function):
            defined = f"{getattr(function, '__name__', '')}{inspect.signature(function)}"
        raise ConfigError(
            f"{collective} calls its algorithms as {name}({', '.join(given)}), but {name!r} is "
            f"defined as {defined}: {misfit}"
        ) from None


def _given(collective: str) -> list[str]:
    """List the arguments that each algorithm of the collective is given, in order."""
    first = inspect.signature(next(iter(IMPLEMENTATIONS[collective].values()))).parameters
    return [name for name in first if name in _COMMON]


def check_algorithm(collective: object, name: object, auto: bool = True) -> None:
    """Raise `ConfigError` unless a collective has an algorithm of this name; auto: or "auto"."""
    check_choice("collective", collective, IMPLEMENTATIONS)
    names = *IMPLEMENTATIONS[str(collective)], *["auto"] * auto
    check_choice(f"{collective} algorithm", name, names)


def choose(collective: str, name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The bare function registered under these names, with `options` of its own filled in.

    Raises `ConfigError` for options that it does not have.
    """
    function = IMPLEMENTATIONS[collective][name]
    if not options:
        return function
    parameters = inspect.signature(function).parameters
    own = list(parameters)[len(_given(collective)) :]
    for key, value in options.items():
        if key not in own:
            raise ConfigError(f"{collective} {name!r} has no option {key!r}; "
                              f"it has: {', '.join(own) or 'none'}")
        if parameters[key].annotation in ("int", int):
            check_whole(f"{collective} {name!r}: {key}", value)
    return functools.partial(function, **options)


def default_of(collective: str) -> str:
    """The algorithm that a collective takes if none is named. Raises `ConfigError` for an unknown
    one."""
    check_choice("collective", collective, IMPLEMENTATIONS)
    return str(inspect.signature(_collectives[collective]).parameters["algorithm"].default)


def check_comm(comm: object, call: str) -> None:
    """Raise `ConfigError` unless `comm` is a communicator; call: the call, for the message."""
    if not isinstance(comm, Comm):
        raise ConfigError(f"{call} takes a communicator, not {type(comm).__name__}")


def check_tensor(comm: Comm, x: Any, collective: str, writes: bool = True) -> None:
    """Raise unless `x` is a dense tensor on the communicator's device (or on "meta": no data).

    writes: will the collective change `x`? Then its elements must not share memory.
    """
    if not isinstance(x, torch.Tensor):
        raise ConfigError(
            f"rank {comm.rank}: {collective} takes a tensor, not {type(x).__name__}; "
            f"make one of numbers by torch.tensor(...), of a list of tensors by torch.stack(...)"
        )
    if x.device != comm.device and x.device.type not in (comm.device.type, "meta"):
        raise ConfigError(
            f"rank {comm.rank}: {collective} got a tensor on {x.device}, but this communicator "
            f"works on {comm.device}; move it with .to(comm.device)"
        )
    if kind := not_dense(x):
        raise ShapeMismatch(f"rank {comm.rank}: {collective} needs a dense tensor, not {kind}")
    if writes and not x.is_contiguous() and overlaps_itself(x):
        raise ShapeMismatch(f"rank {comm.rank}: {collective} can't change a tensor whose elements "
                            f"share memory, as an expanded one's do; give it a copy "
                            f"(x.contiguous())")


def check_parts(
    comm: Comm, parts: torch.Tensor, collective: str, like: torch.Tensor | None = None
) -> None:
    """Raise unless the shape of `parts` is (p, …): one part a rank; each like `like`."""
    shape = tuple(parts.shape)
    if not shape or shape[0] != comm.size:
        raise ShapeMismatch(
            f"rank {comm.rank}: {collective} needs parts of shape ({comm.size}, …), a part for "
            f"each rank; got {shape}"
        )
    if like is not None and (shape[1:] != tuple(like.shape) or parts.dtype != like.dtype):
        raise ShapeMismatch(
            f"rank {comm.rank}: {collective} needs parts like x; a part is {parts.dtype} "
            f"{shape[1:]}, x is {like.dtype} {tuple(like.shape)}"
        )


def output_for(
    comm: Comm, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor,
    collective: str,
) -> torch.Tensor:
    """A tensor of this shape, of the dtype and device of `like`, for the result: `out`, if given.

    Raises unless `out` is such a tensor, contiguous, with memory of its own.
    """
    if out is None:
        return like.new_empty(shape)
    check_tensor(comm, out, collective)
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device:
        raise ShapeMismatch(
            f"rank {comm.rank}: {collective} needs an out of {like.dtype} {shape} on "
            f"{like.device}; got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    if not out.is_contiguous():
        raise ShapeMismatch(f"rank {comm.rank}: {collective} needs an out without gaps; "
                            f"give it a contiguous tensor")
    if not out.is_meta and out.nbytes and _overlap(out, like, like.numel() * comm.rank):
        raise ShapeMismatch(f"rank {comm.rank}: {collective} can't write its result over its "
                            f"input; give it an out with memory of its own")
    return out.detach() if out.requires_grad else out


def _overlap(out: torch.Tensor, x: torch.Tensor, own: int) -> bool:
    """Does `x` lie in the memory of `out`, elsewhere than where its elements will be: at `own`?"""
    first, start = out.data_ptr(), x.data_ptr()
    if start >= first + out.nbytes or first >= start + span_bytes(x):
        return False
    in_place = x.shape != out.shape and start == first + own * out.itemsize
    return not (in_place and x.is_contiguous())


def check_root(comm: Comm, root: int, collective: str) -> None:
    """Raise `ConfigError` unless `root` is one of the ranks."""
    if not is_whole(root) or not 0 <= root < comm.size:
        raise ConfigError(
            f"rank {comm.rank}: {collective} has no root {root!r}; "
            f"the ranks here are 0 to {comm.size - 1}"
        )


def check_at_root(comm: Comm, root: int, given: object, what: str) -> None:
    """Raise `ConfigError` if a rank that is not the root gives what the root alone has."""
    if given is not None and comm.rank != root:
        raise ConfigError(f"rank {comm.rank}: {what} are given by the root, rank {root}, alone; "
                          f"other ranks pass None")


def detached(x: torch.Tensor) -> torch.Tensor:
    """A view of `x` without history, which may be changed here even if `x` was made under
    `torch.inference_mode`: outside of it, torch lets nobody add to such a tensor."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        y = x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        y = y.conj() if x.is_conj() else y
        return torch._neg_view(y) if x.is_neg() else y
    return x.detach()


def flattened(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as a contiguous vector without history: a view where possible, else a copy."""
    if (x.__class__ is torch.Tensor and x.ndim == 1 and not x.requires_grad and x.is_contiguous()
            and not x.is_inference()):
        return x  # it is one
    return detached(x).reshape(-1)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """The parts `x` as the rows of a contiguous matrix without history: a view where possible."""
    if (x.__class__ is torch.Tensor and x.ndim == 2 and not x.requires_grad and x.is_contiguous()
            and not x.is_inference() and x.stride(1) == 1):  # a column that was a row has others
        return x  # it is one
    numel = x.numel() // len(x)  # of a row; one number alone may have any step, after view, too
    return detached(x).contiguous().as_strided((len(x), numel), (numel, 1))


def write_back(x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """If `flat` had to be a copy of `x`, copy the result into `x`. Returns `x`."""
    if not x.is_meta and flat.data_ptr() != x.data_ptr():
        detached(x).copy_(flat.view(x.shape))
    return x


@lru_cache(maxsize=64)  # simulated ranks share one list: thousands of them would fill the caches
def chunk_edges(n: int, parts: int) -> tuple[int, ...]:
    """Where to cut n elements into `parts` chunks: chunk c is x[edges[c]:edges[c + 1]].

    Sizes differ by one at most, the larger ones first, as torch.tensor_split cuts.
    """
    small, extra = divmod(n, parts)
    return tuple(c * small + min(c, extra) for c in range(parts + 1))


def cut(x: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """The vector `x` in `parts` chunks, which are views: see `chunk_edges`.

    Without data (on "meta") chunks of the same size are one and the same: thousands of simulated
    ranks, each with thousands of chunks, would else fill the memory.
    """
    if x.is_meta:
        small, extra = divmod(x.numel(), parts)
        return (x[: small + 1],) * extra + (x[:small],) * (parts - extra)
    edges = chunk_edges(x.numel(), parts)
    return x.split_with_sizes([end - start for start, end in pairwise(edges)])
