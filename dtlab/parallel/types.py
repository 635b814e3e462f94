"""SPMD types: what a tensor is along an axis of ranks, and which tensors may meet.

| letter | type       | values on the ranks         | its gradient                                |
|--------|------------|-----------------------------|---------------------------------------------|
| R      | Replicated | the same                    | Partial: each rank computes a part of it    |
| I      | Invariant  | the same                    | Invariant: each rank computes all of it     |
| V      | Varying    | different                   | Varying                                     |
| P      | Partial    | different; the sum is meant | Replicated                                  |

R and V together make V; P stays P under linear operations, and no others take it; I meets only I
and what needs no gradient. Each change of type is a conversion: a collective, or one half of a
conjugate pair (`dtlab.parallel.conversions`). So the forward pass shows, on tensors without data,
which gradients a forgotten conversion would spoil. Idea and rules: the public project spmd_types
(meta-pytorch), "Local SPMD types". Chapter: 11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from dtlab import collectives
from dtlab.collectives.registry import overridable
from dtlab.comm import Comm
from dtlab.errors import ConfigError, TypeMismatch
from dtlab.parallel.mesh import Mesh
from dtlab.tracebacks import calling_frame, line_of, variable_name

REPLICATED, INVARIANT, VARYING, PARTIAL = "R", "I", "V", "P"
WORDS = {"R": "Replicated", "I": "Invariant", "V": "Varying", "P": "Partial"}
GRADIENT = {"R": "P", "I": "I", "V": "V", "P": "R", "": ""}  # the type of its gradient
# Collectives, of which autograd sees nothing: what they take, and what they return; others make V.
COLLECTIVES = {"all_reduce": ("P", "I"), "broadcast": ("RIVP", "I"), "all_gather": ("RIV", "I"),
               "reduce": ("P", "V"), "reduce_scatter": ("P", "V")}
SUMS = {"add", "sub", "cat", "stack"}
PRODUCTS = {"mul", "matmul", "mm", "bmm", "linear", "einsum", "div"}
LINEAR = SUMS | PRODUCTS | {
    "neg", "sum", "mean", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "T",
    "mT", "split", "chunk", "tensor_split", "getitem", "unbind", "select", "narrow", "expand",
    "clone", "contiguous", "to", "float", "double", "bfloat16", "squeeze", "unsqueeze", "view_as",
    "repeat", "repeat_interleave", "detach", "data", "gather", "index_select"}
RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout"}
UNSEEN = __file__, collectives.__path__[0], torch.__path__[0]  # their lines are not named

Function = TypeVar("Function", bound=Callable[..., Any])
known_letters = WeakIdKeyDictionary()  # tensor → {axis: letter}
_reduced = WeakIdKeyDictionary()  # parameter → the axes along which somebody reduces its gradient
_gradients = WeakIdKeyDictionary()  # the parameters' gradients


class Typed(NamedTuple):
    """What one operation has made."""

    line: str  # "model.py:12 in forward"
    operation: str
    shape: tuple[int, ...]
    letters: dict[str, str]  # axis → letter


def declare(x: Tensor, comm: Comm, letter: str, reduced: bool = False) -> None:
    """Say what `x` is along the ranks of `comm`. Parameters are Invariant otherwise; all else, of
    which nothing is known, meets everything.

    reduced: somebody (as `DataParallel` does) reduces its gradient before it is used.
    """
    if letter not in WORDS:
        raise ConfigError(f"a type is one of R, I, V, P, not {letter!r}")
    known_letters.setdefault(x, {}).update(dict.fromkeys(comm.axes, letter))
    if reduced:
        _reduced.setdefault(x, set()).update(comm.axes)


def conversion(before: str, after: str) -> Callable[[Function], Function]:
    """Declares that the decorated function(comm, x, …) turns an `x` of one type along the ranks of
    `comm` into another type, and that its backward fits that."""

    def decorate(function: Function) -> Function:
        seen = overridable(function)
        seen.converts = before, after  # type: ignore[attr-defined]
        return seen

    return decorate


def check(fn: Callable[..., Any], group: Comm | Mesh, *args: Any, device: str = "meta"
          ) -> list[Typed]:
    """Run `fn(group, *args)` once on this rank and check the types of all tensors that meet. All
    ranks call it: `simulate(lambda comm: types.check(step, comm), network=…)`.

    The tensors in `args`, and those that `fn` makes, lie on `device`: "meta" is without data. A
    scalar that `fn` returns is the loss. Returns what each line has made, with its letters. Raises
    `TypeMismatch`, which names the line, the tensor and the conversion that is missing.
    """
    if not callable(fn) or not isinstance(group, (Comm, Mesh)):
        raise ConfigError(f"types.check needs a function and the communicator or mesh that it gets,"
                          f" not {fn!r} and {group!r}")
    checker = _Checker(tuple(group.axes))
    args = tree_map_only(
        Tensor, lambda x: x.detach().to(device).requires_grad_(x.requires_grad), args)
    with torch.device(device), checker:
        loss = fn(group, *args)
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
            checker.check_seed(loss)
    return checker.made


class _Checker(TorchFunctionMode):
    """Sees each operation on tensors before it runs, and notes the letters of its result."""

    def __init__(self, axes: tuple[str, ...]):
        super().__init__()
        self.axes, self.made = axes, list[Typed]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, in_place = _operation(func)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if (torch._C._current_graph_task_id() != -1  # backward follows from forward
                or not (inputs or operation in RANDOM) or operation == "set"
                or getattr(func, "__module__", "") == "torch.nn.init"):  # declared, if V
            return func(*args, **kwargs)
        if operation == "backward":
            self.check_seed(inputs[0])
        letters = {}
        for axis in self.axes:
            if operation == "grad":
                letters[axis] = (INVARIANT if axis in _reduced.get(args[0], ())
                                 else GRADIENT[_letter(args[0], axis)])
            elif isinstance(args[0] if args else None, Comm):
                turns = getattr(func, "converts", None) or COLLECTIVES.get(operation, ("RIVP", "V"))
                comm, x, *_ = args
                letters[axis] = _converted(operation, comm, x, axis, turns, kwargs.get("op"))
            else:
                letters[axis] = _met(operation, inputs, axis, args, kwargs)
            if in_place and letters[axis] in (VARYING, PARTIAL):
                self._check_target(operation, inputs[0], axis, letters[axis])
        made = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        for x in outputs or inputs[: int(in_place)]:
            if operation == "grad":
                _gradients[x] = None
            if not isinstance(x, nn.Parameter):
                known_letters[x] = {axis: letter for axis, letter in letters.items() if letter}
        if outputs and any(letters.values()) and operation not in ("grad", "data"):
            self.made.append(Typed(line_of(calling_frame(UNSEEN)), operation,
                                   tuple(outputs[0].shape), {**known_letters.get(outputs[0], {})}))
        return made

    def _check_target(self, operation: str, x: Tensor, axis: str, letter: str) -> None:
        """Raise if the operation would make a parameter or gradient differ from rank to rank."""
        if (_letter(x, axis) in (INVARIANT, REPLICATED)
                and (isinstance(x, nn.Parameter) or x in _gradients)):
            raise _error(axis, f"{operation} makes {_called(x)}, which is the same on all ranks, "
                         f"{WORDS[letter]}", "reduce over the ranks what it is changed by")

    def check_seed(self, loss: Tensor) -> None:
        """Backward begins with a gradient of 1 on each rank: wrong if the loss is Replicated."""
        for axis in self.axes:
            if _letter(loss, axis) == REPLICATED:
                raise _error(axis, "the loss is Replicated", "the ranks' gradients of it add up, "
                             "and all are p times too large; end with reduce_from(comm, …), or "
                             "declare inputs that differ from rank to rank Varying")


def _letter(x: Tensor, axis: str) -> str:
    """Of `x`; "" if nothing is known. Without a gradient, Invariant and Replicated are the same."""
    letter: str = known_letters.get(x, {}).get(axis) or (
        INVARIANT if isinstance(x, nn.Parameter) or (x.requires_grad and x.is_leaf) else "")
    return REPLICATED if letter == INVARIANT and not x.requires_grad else letter


def _converted(name: str, comm: Comm, x: Tensor, axis: str, converts: tuple[str, str], op: Any
               ) -> str:
    """The letter of what the conversion `name` makes of `x`."""
    letter, (takes, gives) = _letter(x, axis), converts
    if axis not in comm.axes:
        return letter
    also = {PARTIAL: VARYING,  # that their sum is meant is clear now
            INVARIANT: "" if x.requires_grad else REPLICATED}.get(takes, "")
    if letter and letter not in takes + also and not (op in ("avg", "max", "min")
                                                      and letter in "RI"):
        why = ("it is the same on all ranks, and the sum a multiple of it" if takes == PARTIAL
               else "its gradients would be added up twice" if letter == REPLICATED
               else "its ranks' values differ; reduce_from or gather_from makes them the same")
        raise _error(axis, f"{name} takes what is {WORDS[takes[0]]}, but {_called(x)} is "
                     f"{WORDS[letter]}", why)
    return gives


def _met(operation: str, inputs: list[Tensor], axis: str, args: Any, kwargs: Any) -> str:
    """The letter of what an ordinary operation makes of its inputs."""
    met: dict[str, Tensor | str] = {}  # letter → the first that has it
    for x in inputs:
        letter = _letter(x, axis)
        if letter in (VARYING, PARTIAL) or (letter and x.requires_grad):
            met.setdefault(letter, x)
    if operation in RANDOM and not kwargs.get("generator") and kwargs.get("training", True):
        met.setdefault(VARYING, "random numbers")
    if INVARIANT in met and len(met) > 1:
        letter = next(letter for letter in met if letter != INVARIANT)
        one, other = _called(met[INVARIANT]), _called(met[letter])
        advice = f"copy_to(comm, {one}) is missing, which adds up the parts of its gradient"
        if other == "random numbers":
            advice = "use counter_dropout, or a generator with one seed"
        elif operation in SUMS and letter != REPLICATED:
            advice = (f"reduce_from(comm, {other}) is missing if the ranks' values are parts of a "
                      f"sum; otherwise {advice}")
        raise _error(axis, f"{operation} mixes {one}, which is Invariant, with {other}, which is "
                     f"{WORDS[letter]}", advice)
    if PARTIAL in met:
        whole: list[Any] = [x for x in inputs if _letter(x, axis) != PARTIAL]
        terms = [*whole, *(x for x in args if isinstance(x, (int, float)) and x)]
        name, problem = f"{_called(met[PARTIAL])}, which is Partial", ""
        if operation not in LINEAR:
            problem = f"{operation} of {name}, is not linear"
        elif (operation in SUMS and terms) or (operation == "linear" and len(inputs) > 2):
            problem = f"{operation} adds {_called(terms[-1])} to {name}, on every rank"
        elif operation in PRODUCTS and (VARYING in met or len(whole) < len(inputs) - 1):
            problem = f"{operation} multiplies {name}, by what differs from rank to rank"
        if problem:
            raise _error(axis, problem, f"reduce_from(comm, {_called(met[PARTIAL])}) is missing")
    return next((letter for letter in "PVIR" if letter in met), "")


def _operation(func: Any) -> tuple[str, bool]:
    """Its name without what torch adds ("__radd__" is "add"), and does it work in place?"""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__, False
    bare = name.strip("_").replace("truediv", "div")
    if name.startswith("__") and bare[0] in "ri" and bare[1:] in SUMS | PRODUCTS:
        return bare[1:], bare[0] == "i"
    return bare, (name.endswith("_") and name[:2] != "__") or bare == "setitem"


def _called(x: Any) -> str:
    return (variable_name(x, calling_frame(UNSEEN)) or f"a tensor of shape {tuple(x.shape)}"
            if isinstance(x, Tensor) else str(x))


def _error(axis: str, problem: str, advice: str) -> TypeMismatch:
    along = "" if axis == "ranks" else f" along {axis!r},"
    return TypeMismatch(f"{line_of(calling_frame(UNSEEN))}:{along} {problem}: {advice}")
