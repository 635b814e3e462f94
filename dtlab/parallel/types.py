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
(meta-pytorch), "Local SPMD types". That is stricter in two things: there, every tensor needs a
type, and what varies is converted to P before it is added up. Here labels, masks and constants need
none, and all_reduce of V says itself that a sum is meant. No type says which dimension is cut: a
softmax or a norm along it, of this rank's part only, is V of V, and passes. Chapter: 11.
"""

from __future__ import annotations

import inspect
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
from dtlab.parallel.hooks import in_autograd
from dtlab.parallel.linear import LINEAR, leaves, misfit
from dtlab.parallel.mesh import Mesh
from dtlab.parallel.rank_numbers import Parts, RankMesh, RankNumber, with_rank_number
from dtlab.tracebacks import calling_frame, line_of, variable_name

REPLICATED, INVARIANT, VARYING, PARTIAL = "R", "I", "V", "P"
WORDS = {"R": "Replicated", "I": "Invariant", "V": "Varying", "P": "Partial"}
GRADIENT = {"R": "P", "I": "I", "V": "V", "P": "R", "": ""}  # the type of its gradient
# Collectives, of which autograd sees nothing: what they take, and what they return; others make V.
COLLECTIVES = {"all_reduce": ("P", "I"), "broadcast": ("RIV", "I"), "all_gather": ("RIV", "I"),
               "reduce": ("P", "V"), "reduce_scatter": ("P", "V")}
# What says something of a tensor without its values, or makes one that all ranks fill alike;
# and so do all properties but these.
METADATA = """
    dim ndimension size numel nelement len stride storage_offset element_size
    is_contiguous is_floating_point is_complex is_same_size is_tensor get_device hash repr
    zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
    requires_grad retain_grad register_hook register_post_accumulate_grad_hook"""
VALUES = {"data", "grad", "T", "mT", "H", "mH", "real", "imag"}
READS = {"item", "tolist", "bool", "int", "numpy"}  # values, which the device meta has not
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
          "bernoulli", "multinomial", "dropout", "dropout1d", "dropout2d", "dropout3d",
          "alpha_dropout", "feature_alpha_dropout"}
# Their lines are not named.
UNSEEN = __file__, inspect.getfile(RankNumber), collectives.__path__[0], torch.__path__[0]

Function = TypeVar("Function", bound=Callable[..., Any])
known_letters = WeakIdKeyDictionary()  # tensor → {axis: letter}
_reduced = WeakIdKeyDictionary()  # parameter → the axes along which somebody reduces its gradient
_zeros = WeakIdKeyDictionary()  # tensors of zeros, which change no sum over ranks


class Typed(NamedTuple):
    """A result of one operation."""

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

    `comm.rank` and a mesh's coordinates are Varying, and so is what arithmetic makes of them; see
    `RankNumber` for what is not seen. The tensors in `args`, and those that `fn` makes, lie on
    `device`: "meta" is without data. A scalar that `fn` returns is the loss. Returns what each line
    has made, with its letters. Raises `TypeMismatch`, which names the line, the tensor and the
    conversion that is missing.
    """
    if not callable(fn) or not isinstance(group, (Comm, Mesh)):
        raise ConfigError(f"types.check needs a function and the communicator or mesh that it gets,"
                          f" not {fn!r} and {group!r}")
    checker = _Checker(tuple(group.axes))
    group = (RankMesh(group) if isinstance(group, Mesh) else with_rank_number(group, group.axes))
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
        self.gradients = WeakIdKeyDictionary()  # those read since the last backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, in_place = _operation(func)
        if func == vars(Tensor.__base__)["grad"].__set__ and args[1] is not None:
            self.gradients[args[1]] = None  # what it is made of says what it is
        inputs: list[Any] = [x for x in leaves((args, kwargs))
                             if isinstance(x, (Tensor, RankNumber))]
        by_rank = any(isinstance(x, RankNumber) for x in inputs)
        if (in_autograd()  # backward follows from forward
                or not (inputs or operation in RANDOM) or operation == "set"
                or (operation in METADATA.split() and not by_rank)
                or getattr(func, "__module__", "") == "torch.nn.init"):  # declared, if V
            made = func(*args, **kwargs)
            if operation in ("zeros", "zeros_like", "new_zeros"):
                _zeros[made] = None
            return made
        if operation in ("backward", "autograd.grad"):
            return self._differentiated(func, args, kwargs)
        letters = {}
        for axis in self.axes:
            letters[axis] = _made(operation, func, inputs, axis, args, kwargs)
            if in_place and letters[axis] in (VARYING, PARTIAL):
                self._check_target(operation, inputs[0], axis, letters[axis])
        if operation in READS and inputs[0].is_meta:
            if calling_frame((__file__,)).f_globals.get("__name__", "").startswith("torch.optim."):
                return 1.0  # the number of its steps, which torch before 2.13 has on this device
            raise ConfigError(f"{line_of(calling_frame(UNSEEN))}: {operation} reads a value, which "
                              f"tensors on the device meta don't have; leave it out, or give "
                              f'types.check device="cpu"')
        made = func(*args, **kwargs)
        if in_place:
            _zeros.pop(inputs[0], None)
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        for x in outputs or inputs[: int(in_place)]:
            reduced = operation == "grad" and x in self.gradients  # since then, perhaps
            if operation == "grad":
                self.gradients[x] = None
            if not (isinstance(x, nn.Parameter) or reduced):
                known_letters[x] = {axis: letter for axis, letter in letters.items() if letter}
        if outputs and any(letters.values()) and operation not in ("grad", "data"):
            self.made.append(Typed(line_of(calling_frame(UNSEEN)), operation,
                                   tuple(outputs[0].shape), {**known_letters.get(outputs[0], {})}))
        return Parts(made) if type(made) is tuple else made

    def _differentiated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`, backward or torch.autograd.grad, and type what it makes."""
        for loss in tree_leaves(args[0]):
            self.check_seed(loss)
        made = func(*args, **kwargs)
        if made is None:
            self.gradients.clear()
        else:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for x, gradient in zip(tree_leaves(inputs), made, strict=True):
                if gradient is not None:
                    known_letters[gradient] = {axis: GRADIENT[_letter(x, axis)]
                                               for axis in self.axes}
        return made

    def _check_target(self, operation: str, x: Tensor, axis: str, letter: str) -> None:
        """Raise if the operation would make a parameter or gradient differ from rank to rank."""
        if (_letter(x, axis) in (INVARIANT, REPLICATED)
                and (isinstance(x, nn.Parameter) or x in self.gradients)):
            raise _error(axis, f"{operation} makes {_called(x)}, which is the same on all ranks, "
                         f"{WORDS[letter]}", "reduce over the ranks what it is changed by")

    def check_seed(self, loss: Tensor) -> None:
        """Backward begins with a gradient of 1 on each rank: wrong if the loss is Replicated."""
        for axis in self.axes:
            if _letter(loss, axis) == REPLICATED:
                raise _error(axis, "the loss is Replicated", "the ranks' gradients of it add up, "
                             "and all are p times too large; end with reduce_from(comm, …), or "
                             "declare inputs that differ from rank to rank Varying")


def _letter(x: Any, axis: str) -> str:
    """Return the letter of `x`; "" if nothing is known. Without a gradient, Invariant is
    Replicated."""
    if not isinstance(x, Tensor):
        return VARYING if isinstance(x, RankNumber) and axis in x.axes else ""
    letter: str = known_letters.get(x, {}).get(axis) or (
        INVARIANT if isinstance(x, nn.Parameter) or (x.requires_grad and x.is_leaf) else "")
    return REPLICATED if letter == INVARIANT and not x.requires_grad else letter


def _made(operation: str, func: Any, inputs: list[Any], axis: str, args: Any, kwargs: Any) -> str:
    """The letter of what `func` makes of its arguments."""
    if operation == "grad":
        return INVARIANT if axis in _reduced.get(args[0], ()) else GRADIENT[_letter(args[0], axis)]
    if not isinstance(args[0] if args else None, Comm):
        return _met(operation, inputs, axis, args, kwargs)
    turns = getattr(func, "converts", None) or COLLECTIVES.get(operation, ("RIVP", "V"))
    given = inspect.signature(func).bind_partial(*args, **kwargs).arguments
    comm, x, *_ = given.values()
    return _converted(operation, comm, x, axis, turns, given.get("op"))


def _converted(name: str, comm: Comm, x: Tensor, axis: str, converts: tuple[str, str], op: Any
               ) -> str:
    """The letter of what the conversion `name` makes of `x`."""
    letter, (takes, gives) = _letter(x, axis), converts
    if axis not in comm.axes:
        return letter
    also = {PARTIAL: VARYING,  # that their sum is meant is clear now
            INVARIANT: "" if x.requires_grad else REPLICATED}.get(takes, "")
    if letter == PARTIAL and op not in (None, "sum", "avg"):
        raise _error(axis, f"{name} with op={op!r} of {_called(x)}, which is Partial",
                     "the sum is meant, and nothing else of the ranks' parts is of any use")
    if letter and letter not in takes + also and not (op in ("avg", "max", "min")
                                                      and letter in "RI"):
        why = ("it is the same on all ranks, and the sum a multiple of it" if takes == PARTIAL
               else "its gradients would be added up twice" if letter == REPLICATED
               else "its ranks' values differ; reduce_from or gather_from makes them the same")
        raise _error(axis, f"{name} takes what is {WORDS[takes[0]]}, but {_called(x)} is "
                     f"{WORDS[letter]}", why)
    return gives


def _met(operation: str, inputs: list[Any], axis: str, args: Any, kwargs: Any) -> str:
    """The letter of what an ordinary operation makes of its inputs."""
    met: dict[str, Any] = {}  # letter → the first that has it
    for x in inputs[int(operation == "copy") :]:  # into the first, whatever was there
        letter = _letter(x, axis)
        if letter in (VARYING, PARTIAL) or (
                letter and x.requires_grad and torch.is_grad_enabled()):
            met.setdefault(letter, x)
    if (operation in RANDOM and not kwargs.get("generator")
            and kwargs.get("training", True) and kwargs.get("p", 1)):  # else dropout draws nothing
        met.setdefault(VARYING, "random numbers")
    if INVARIANT in met and len(met) > 1:
        letter = next(letter for letter in met if letter != INVARIANT)
        one, other = _called(met[INVARIANT]), _called(met[letter])
        advice = f"copy_to(comm, {one}) is missing, which adds up the parts of its gradient"
        if other == "random numbers":
            advice = "use counter_dropout, or a generator with one seed"
        elif letter == PARTIAL or (operation in ("add", "sub", "cat", "stack")
                                   and letter == VARYING):
            advice = (f"reduce_from(comm, {other}) is missing if the ranks' values are parts of a "
                      f"sum; otherwise {advice}")
        raise _error(axis, f"{operation} mixes {one}, which is Invariant, with {other}, which is "
                     f"{WORDS[letter]}", advice)
    if PARTIAL in met:
        problem = misfit(operation, args, kwargs, lambda x: _letter(x, axis) or (
            "0" if isinstance(x, Tensor) and x in _zeros else ""))
        if problem is not None:
            (does, other), partial = problem, _called(met[PARTIAL])
            which = f", which is {WORDS[_letter(other, axis)]}" if _letter(other, axis) else ""
            sentence = (f"{operation} of {partial}, which is Partial, "
                        f"{does.format(_called(other) + which)}")
            raise _error(axis, sentence, f"reduce_from(comm, {partial}) is missing")
    return next((letter for letter in "PVIR" if letter in met), "")


def _operation(func: Any) -> tuple[str, bool]:
    """Return its name without torch's part ("__radd__" is "add"), and whether it is in place."""
    name = getattr(func, "__name__", "")
    if name == "__float__":
        return "item", False
    if name == "grad":  # the property of this name is below
        return "autograd.grad", False
    if name == "__get__":
        name = func.__self__.__name__
        return name if name in VALUES else "size", False
    bare = name.strip("_").replace("truediv", "div")
    if name.startswith("__") and bare[0] in "ri" and bare[1:] in LINEAR and bare not in LINEAR:
        return bare[1:], bare[0] == "i"
    return bare, (name.endswith("_") and name[:2] != "__") or bare == "setitem"


def _called(x: Any) -> str:
    return (variable_name(x, calling_frame(UNSEEN)) or f"a tensor of shape {tuple(x.shape)}"
            if isinstance(x, Tensor) else str(x))


def _error(axis: str, problem: str, advice: str) -> TypeMismatch:
    along = "" if axis == "ranks" else f" along {axis!r},"
    return TypeMismatch(f"{line_of(calling_frame(UNSEEN))}:{along} {problem}: {advice}")
