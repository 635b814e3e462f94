"""Clues to mistakes that can be made in any exercise: ranks that wait for each other, operations
that no rank waited for, nothing returned, a name rebound instead of memory written, …"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import Any

import torch

from dtlab.grading.case import ANY, Case, CaseFailure, Outcome, Wanted
from dtlab.grading.compare import difference
from dtlab.grading.frames import Opaque

NOT_YOURS = ", which is the library's own: only what you write yourself earns points."
REAL = "It works in the simulator, but not on real processes over Gloo."


def clue(case: Case, outcome: Outcome) -> str:
    """Return the clue to the mistake that the outcome shows; "" if it shows none of these."""
    if outcome.failure is not None:
        return failure_clue(outcome.failure)
    if name := collective_in(case, outcome):
        return f"The answer calls {name}{NOT_YOURS}"
    return _value_clue(case, outcome)


def collective_in(case: Case, outcome: Outcome) -> str:
    """The collective of this package that sent a message, by the message's label, though the case
    allows none; "" if there is none."""
    if case.library or outcome.failure:
        return ""
    calls = (re.match(r"(\w+)\(.*algorithm=", m.label) for m in outcome.trace.transfers)
    return next((f"dtlab.collectives.{call[1]}" for call in calls if call), "")


# ---- wrong values -------------------------------------------------------------------------------


def _value_clue(case: Case, outcome: Outcome) -> str:
    wanted = case.wanted
    for actual in outcome.values:
        if isinstance(actual, Opaque) and actual.startswith(("<generator", "<coroutine")):
            return _GENERATOR if actual.startswith("<g") else _COROUTINE
    if wanted is None:
        nothing = outcome.values and all(value is None for value in outcome.values)
        return _NOTHING if nothing else ""
    pairs = _argument_pairs(wanted.args_after, outcome.args_after)
    if wanted.returns is not None:
        pairs = list(zip(outcome.values, wanted.returns, strict=True))
        if clue := _return_clue(pairs, wanted, () if case.harness else wanted.items):
            return clue
    elif clue := _in_place_clue(case, outcome, wanted):
        return clue
    wrong = [pair for pair in _leaves(pairs) if difference("", *pair, wanted.rtol)]
    if clue := next((clue for pair in wrong if (clue := _kind_clue(*pair))), ""):
        return clue
    if any(isinstance(actual, torch.Tensor) and actual.isnan().sum() > right.isnan().sum()
           for actual, right in wrong):
        return _UNWRITTEN
    if wrong and all(_rounded(*pair) for pair in wrong):
        return _ROUNDED
    if wrong and case.ranks > 1 and all(_scaled(*pair, 1 / case.ranks) for pair in wrong):
        return "What is wrong is divided by the number of ranks once too often: is it a mean?"
    if wrong and case.ranks > 1 and all(_scaled(*pair, case.ranks) for pair in wrong):
        return "What is wrong is as many times too large as there are ranks: is it a sum?"
    if not wrong and outcome.trace.sent_bytes() < wanted.least_bytes:
        return ("The values are right, but fewer bytes were sent than it takes: they did not come "
                "through comm, and only what does counts.")
    return ""


def _argument_pairs(wanted: Sequence[Any] | None, actual: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return (actual, right) for each argument that is judged. wanted, actual: by rank."""
    return [pair for args, right in zip(actual, wanted or (), strict=False)
            for pair in zip(args, right, strict=False) if pair[1] is not ANY]


def _return_clue(pairs: Sequence[tuple[Any, Any]], wanted: Wanted, items: Sequence[str]) -> str:
    """Explain what is wrong with the form of what is returned. items: what the function itself
    returns, if it is several things, rather than a harness."""
    if all(actual is None and right is not None for actual, right in pairs):
        return _NOTHING
    if items and not all(isinstance(actual, (tuple, list)) and len(actual) == len(items)
                         for actual, _ in pairs):
        return (f"Return a tuple or a list of {len(items)} things, in this order: "
                f"{', '.join(items)}.")
    if items and all(difference("", actual, right, wanted.rtol) and any(
            difference("", order, right, wanted.rtol) is None for order in permutations(actual))
            for actual, right in pairs):
        return f"All is right, but in another order: return {', '.join(items)}."
    if all(isinstance(actual, list) and len(actual) == 1
           and difference("", actual[0], right, wanted.rtol) is None for actual, right in pairs):
        return "Return the value itself, not the list that it is in: inbox[0], say."
    return ""


def _in_place_clue(case: Case, outcome: Outcome, wanted: Wanted) -> str:
    """Explain the mistake of an in-place function: a name rebound, or only one rank is right."""
    wanted_args, actual_args = wanted.args_after or (), outcome.args_after
    ranks = [rank for rank, args in enumerate(wanted_args) if args]
    right = [not any(difference("", *pair, wanted.rtol) for pair in _argument_pairs(
        [wanted_args[rank]], [actual_args[rank]])) for rank in ranks]
    if any(difference("", actual_args[rank], case.args[rank]) for rank in ranks):
        return (f"Only rank {ranks[right.index(True)]} has the right result; every rank must."
                if sum(right) == 1 < len(ranks) else "")
    name, pairs = wanted.names[-1], _argument_pairs(wanted_args, actual_args)
    if all(difference("", outcome.values[rank], result, wanted.rtol) is None
           for rank, (_, result) in zip(ranks, pairs, strict=False)):
        return (f"The returned tensor is right, but {name} itself is unchanged: work in place, on "
                f"the memory of {name} ({name}[...] = …, {name}.add_(…), {name}.copy_(…), or "
                f"receive into it).")
    return (f"{name} is unchanged on every rank: nothing was written into it. (`{name} = …` only "
            f"gives the name to another tensor.)")


_UNWRITTEN = ("Where it is nan, nothing was written: torch.empty only makes room, which holds nan "
              "here until something is received into it. (Or it is 0/0.)")
_NOTHING = "The function returns nothing: add `return`."
OBJECTS = ("Objects are sent (a list, a number, …), and an object travels pickled, which takes "
           "more bytes: send the tensor itself, and receive into a tensor.")
_ROUNDED = ("Nearly: these are the right numbers, rounded. Do without round() and //, and without "
            "float32 where float64 came in (dtype=x.dtype, torch.empty_like(x)).")
_GENERATOR = ("The function has a yield, or returns `(… for …)`, so a generator comes back: return "
              "a list.")
_COROUTINE = "The function is an `async def`, so a coroutine comes back: write `def`."


def _leaves(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield (actual, right) of the single values in such pairs, if both have the same structure."""
    for actual, right in pairs:
        if isinstance(right, dict) and isinstance(actual, dict) and set(actual) == set(right):
            yield from _leaves((actual[key], right[key]) for key in right)
        elif (isinstance(right, (list, tuple)) and isinstance(actual, (list, tuple))
              and len(actual) == len(right)):
            yield from _leaves(zip(actual, right, strict=True))
        else:
            yield actual, right


def _kind_clue(actual: Any, right: Any) -> str:
    """Explain that `actual` is of another kind than `right`; "" if it is of the same kind."""
    if isinstance(actual, dict) and isinstance(right, dict):
        return ("A dictionary has other keys than asked for: is one missing, too many, or of "
                "another type (1 is not \"1\")?")
    if isinstance(right, torch.Tensor) and isinstance(actual, torch.Tensor):
        return ("The result has the wrong shape or dtype." if (actual.shape, actual.dtype)
                != (right.shape, right.dtype) else "")
    for kind, name in _KINDS.items():
        if isinstance(right, kind) and not isinstance(actual, kind):
            came = actual[:40] if isinstance(actual, Opaque) else type(actual).__name__
            return (f"None comes back where {name} is asked for: is there a `return`?"
                    if actual is None else f"{name[:1].upper()}{name[1:]} is asked for where "
                    f"{came} comes back.")
    return ""


_KINDS: dict[Any, str] = {
    torch.Tensor: "a tensor", dict: "a dictionary",
    (list, tuple): "a list", (int, float): "a Python number (x.item(), if x is a tensor)"}


def _rounded(actual: Any, right: Any) -> bool:
    """Is `actual` the right value in about the precision of float32, or rounded to a few digits?"""
    if isinstance(right, torch.Tensor) and right.is_floating_point():
        most = right.abs().max().double() if right.numel() else 0.0
        return bool(((actual.double() - right.double()).abs() <= 1e-5 * most).all())
    return isinstance(right, float) and actual != 0 and (
        math.isclose(actual, right, rel_tol=1e-5)
        or actual in {int(right), *(round(right, n) for n in range(6))})


def _scaled(actual: Any, right: Any, factor: float) -> bool:
    """Is `actual` `factor` times what is right, which is not all zero?"""
    if right is ANY or not isinstance(actual, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return bool(actual.shape == right.shape and right.count_nonzero() and torch.allclose(
        actual.to(torch.complex128), right.to(torch.complex128) * factor, rtol=0.02))


# ---- no result ----------------------------------------------------------------------------------


def failure_clue(failure: CaseFailure) -> str:
    """Return the clue to why a call gave no result; "" if that isn't clear."""
    if failure.kind == "deadlock":
        return _deadlock_clue(failure)
    if failure.kind == "died" and failure.message == "signal SIGABRT":
        return _ABORTED
    if failure.kind != "raised":
        at = f" The last line seen: {failure.at}." if failure.at else ""
        return _ENDS.get(failure.kind, "").format(at=failure.at, seen=at)
    said = f"{failure.error}: {failure.message}"
    hint = next((hint for pattern, hint in _RAISED if re.search(pattern, said)), "")
    return hint.replace("{message}", failure.message[:1].upper() + failure.message[1:])


def error_clue(failure: CaseFailure | None) -> str:
    """Quote an error for which there is no clue; "" if none was raised."""
    if failure is None or failure.kind != "raised":
        return ""
    said = f"{failure.error}: {failure.message}".removesuffix(": ")
    at = f" in this line of yours: {failure.at}" if failure.at else ""
    return f"The function ends with an error{at}. It says: {said:.300}."


_ENDLESS = ("The function had not ended in time: look for an infinite loop, or for work that is "
            "done again and again.{seen}")
_ABORTED = ("A rank's process crashed. Over Gloo that happens where a message is larger than what "
            "it is received into: do all ranks make the same calls, with the same sizes?")
_ENDS = {
    "pending": "Call wait() on everything that isend, irecv, post and begin return, or cancel() "
               "it, before the function returns. This line began it: {at}.",
    "hung": _ENDLESS,
    "limit": _ENDLESS,
    "died": "A rank's process ended before the function returned. Don't call exit; return, or "
            "raise an error.",
}


def _deadlock_clue(failure: CaseFailure) -> str:
    doing = {line.split()[1] for line in failure.details.splitlines()[1:]}
    if "split" in doing:
        return ("Some ranks wait in comm.split, which all ranks of comm must call: those that "
                "shall be in no group give the colour None.")
    if doing == {"send"}:
        return ("Every rank waits for another. A send may block until its receiver is there, so a "
                "cycle in which all ranks send first never ends: use comm.sendrecv, or "
                "comm.exchange.")
    if doing == {"recv"}:
        return ("Every rank waits to receive, and none has sent yet: receiving first in a cycle "
                "never ends. Send and receive at once: comm.sendrecv, or comm.exchange.")
    if "returned" in doing:
        return ("Some ranks have returned, while others still wait for them: is every send met by "
                "a receive on the other rank, and the other way round? The table says who waits.")
    return ("The ranks wait for each other: does the rank that you send to receive from you next, "
            "and the one that you receive from send to you? The table says who waits for whom.")


_NO_LEADER = ("comm.split returns None to a rank whose colour is None: only the ranks of that "
              "group may use its communicator (`if group is not None: …`).")
_OBJECT = (
    "One end sends a tensor and the other receives an object, or the other way round. A tensor is "
    "received into a tensor of its shape and dtype, such as torch.empty_like(x), an object into a "
    "list.")
_SIZES = (
    "What one rank sends differs in size from what the other receives into. Do both ends mean the "
    "same part of the vector, and cut it in the same places? Its parts differ in size when p does "
    "not divide n.")
_RAISED = [  # part of "error: message" → hint
    (r"^NotYourOwn: ", "{message}" + NOT_YOURS),
    (r"no \w+ algorithm '(hierarchical|torus)'", "The answer calls an algorithm" + NOT_YOURS),
    (r"^NotImplementedError: ",
     "Not written yet: replace `raise NotImplementedError` by your answer."),
    (r"^NameError: ", "{message}: define what the function needs in the solution cell itself, or "
     "import it there."),
    (r"^MemoryError: ", "The function asks for more memory than there is."),
    (r"^ShapeMismatch: .*an object", _OBJECT),
    (r"^ShapeMismatch: ", _SIZES),
    (r": split is not for sending|: the answer returned \w+, not ", "{message}."),
    (r"cannot pickle 'generator' object", _GENERATOR),
    (r"'tuple' object does not support item assignment",
     "x.tensor_split gives a tuple: its tensors can be changed, the tuple can't, and "
     "`chunks[b] += inbox` assigns to it. Write `chunks[b].add_(inbox)`, or "
     "`comm.accumulate_(chunks[b], inbox)`: both change x in place."),
    (r"tuple index out of range",
     "A tuple has fewer parts than the index asks for. x.tensor_split(k) makes k pieces of any x, "
     "0 to k − 1; x.split(m) makes pieces of m elements, x.chunk(k) may make fewer than k; and an "
     "index that goes round needs % k."),
    (r"can't (send to|receive from) rank -?\d",
     "There is no such rank: ranks are 0 to p − 1. In a circle, (rank + 1) % p and (rank - 1) % p "
     "go round; in a tree or a hypercube, leave out what does not exist."),
    (r"so receive into another tensor$",
     "A tensor is received into while it is being sent. Receive into another one; or, if you pass "
     "on what comes, send in each step what came in the step before."),
    (r"process group",
     "torch.distributed isn't the communicator here. Everything goes through `comm`: comm.send, "
     "comm.recv, comm.sendrecv."),
    (r"'NoneType' object has no attribute|takes a communicator, not None", _NO_LEADER),
    (r"has no root",
     "In a communicator that comm.split returns, ranks are numbered anew, from 0: the first rank "
     "of every group is 0 there, and so is the root."),
]
