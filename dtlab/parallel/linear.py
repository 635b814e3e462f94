"""Operations of torch that are linear: those that a sum over ranks may pass through before it is
added up. What they make of the ranks' parts adds up to what they make of the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Linear in the first argument, whatever the others, if they are the same on all ranks.
UNARY = """
    neg positive sum mean cumsum trace diff
    view reshape flatten ravel unflatten squeeze unsqueeze atleast_1d atleast_2d atleast_3d
    transpose permute t T mT H mH swapaxes swapdims movedim moveaxis roll flip fliplr flipud rot90
    split chunk unsafe_chunk tensor_split split_with_sizes hsplit vsplit dsplit unbind unfold
    getitem select narrow narrow_copy index_select gather take take_along_dim masked_select
    diagonal diag diag_embed tril triu expand expand_as broadcast_to view_as reshape_as
    repeat repeat_interleave tile real imag conj detach data clone contiguous deepcopy zero
    to type_as float double half bfloat16 avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"""
# Arguments by name or place: + is a term, the × together are one term, of which they are the
# factors, . must be the same on all ranks, and _ is overwritten. The last one, with *, takes all
# that follow.
SIGNATURES = {
    "add": "input+ other+", "sub": "input+ other+", "lerp": "input+ end+ weight.",
    "mul": "input× other×", "div": "input+ other. rounding_mode+", "rdiv": "input. other+",
    **dict.fromkeys(("cat", "concat", "stack", "hstack", "vstack", "dstack"), "tensors+ dim."),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "kron", "tensordot"),
                    "input× other×"),
    "einsum": "equation. *operands×", "block_diag": "*tensors+",
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
                     "conv_transpose3d"), "input× weight× bias+"),
    "bilinear": "input1× input2× weight× bias+", "embedding": "input. weight+",
    **dict.fromkeys(("addmm", "addbmm", "baddbmm"), "input+ mat1× mat2× batch1× batch2×"),
    "addmv": "input+ mat× vec×", "addr": "input+ vec1× vec2×",
    "addcmul": "input+ tensor1× tensor2×", "addcdiv": "input+ tensor1× tensor2.",
    "where": "input+ condition+ other+",  # the condition is boolean
    "masked_fill": "input+ mask. value+", "masked_scatter": "input+ mask. source+",
    "pad": "input+ pad. mode. value+", "setitem": "input+ index. value+",
    **dict.fromkeys(("index_add", "index_copy", "scatter_add"), "input+ dim. index. source+ src+"),
    "index_fill": "input+ dim. index. value+", "index_put": "input+ indices. values+",
    "select_scatter": "input+ src+", "slice_scatter": "input+ src+", "diagonal_scatter":
    "input+ src+", "copy": "input_ src+"}
LINEAR = {name: ["input+"] for name in UNARY.split()} | {
    name: signature.split() for name, signature in SIGNATURES.items()}

NOT_LINEAR = "is not linear", None


def leaves(x: Any) -> Iterator[Any]:
    """The tensors, numbers and words in arguments, also in slices."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, slice):
            yield from leaves((leaf.start, leaf.stop, leaf.step))
        elif isinstance(leaf, (Tensor, int, float, complex, str)):
            yield leaf


def misfit(operation: str, args: Any, kwargs: Any, letter: Callable[[Any], str]
           ) -> tuple[str, Any] | None:
    """Return why a sum over ranks may not pass: what the operation does with {}, and that argument;
    None if it may. `letter` gives a tensor's or number's type, "0" of zeros; one at least is P."""
    if operation not in LINEAR or any(  # to integers it is rounded
            isinstance(x, torch.dtype) and not (x.is_floating_point or x.is_complex)
            for x in tree_leaves((args, kwargs))):
        return NOT_LINEAR
    terms: list[list[Any]] = []
    factors: list[Any] = []
    for role, x in _roles(LINEAR[operation], args, kwargs):
        if role == "." or (isinstance(x, Tensor) and x.dtype is torch.bool):
            if letter(x) == "P":
                return NOT_LINEAR
            if letter(x) == "V":
                return "takes {}", x
        elif role == "×":
            factors.append(x)
        elif isinstance(x, str):
            return NOT_LINEAR
        elif role == "+" and letter(x) != "0" and (isinstance(x, Tensor) or x or letter(x)):
            terms.append([x])
    for term in [*terms, factors] if factors else terms:
        parts = [x for x in term if letter(x) == "P"]
        if not parts:
            return "adds {} on every rank", term[0]
        others = [x for x in term if x is not parts[0] and letter(x) == "V"] + parts[1:]
        if others:
            return "multiplies it by {}", others[0]
    return None


def _roles(signature: list[str], args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for place, arg in enumerate(args):
        last = place >= len(signature) and not signature[-1].startswith("*")
        word = "." if last else signature[min(place, len(signature) - 1)]
        yield from ((word[-1], x) for x in leaves(arg))
    by_name = {word.strip("*")[:-1]: word[-1] for word in signature}
    for name, arg in kwargs.items():
        yield from ((by_name.get(name, "."), x) for x in leaves(arg))
