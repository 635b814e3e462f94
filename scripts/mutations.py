"""Small mistakes, put into a piece of Python one at a time by way of its syntax tree.

`mutants(code)` yields every version of a solution cell with one of the slips that people make: an
operator exchanged, a bound off by one, neighbours swapped, a wait or a division forgotten, a wrong
buffer, a condition negated, the wrong thing returned.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv, ast.Add),
    ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult, ast.Mod), ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,),
    ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Lt: (ast.LtE,), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE,), ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.USub: (ast.UAdd,),
}
DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)
OTHER_NAME = {"min": "max", "max": "min", "Send": "Recv", "Recv": "Send", "send": "recv",
              "recv": "send", "amax": "amin", "argmax": "argmin"}
WRAPPERS = {"reversed", "sorted", "clone", "abs", "flatten"}  # the result looks like the argument
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Continue, ast.Break, ast.If, ast.Delete)


class Mutant(NamedTuple):
    """A mutated cell, and the line that differs, before and after."""

    code: str
    before: str
    after: str


def mutants(code: str) -> Iterator[Mutant]:
    """Every mutant of what stands in `code` between the solution's marks, each once."""
    tree = ast.parse(code)
    lines = [line.strip() for line in code.splitlines()]
    first, last = lines.index(BEGIN) + 1, lines.index(END) + 1
    original, alike = ast.unparse(tree), _names_of_one_use(tree)
    seen = {original}
    for parent, field, place, node in list(_children(tree)):
        if not first < getattr(node, "lineno", getattr(parent, "lineno", 0)) < last:
            continue
        for other in _variants(node, parent, field, alike):
            _put(parent, field, place, other)
            mutated = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, place, node)
            if mutated not in seen:
                seen.add(mutated)
                yield Mutant(mutated, *_difference(original, mutated))


def _children(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every node below `parent` that runs, and where it stands in its own parent."""
    for field, value in ast.iter_fields(parent):
        for place, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST) and not _never_runs(field, node):
                yield parent, field, place if isinstance(value, list) else None, node
                yield from _children(node)


def _never_runs(field: str, node: ast.AST) -> bool:
    """Is it an annotation, a text that stands alone, or `strict=True`?"""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    strict = isinstance(node, ast.keyword) and node.arg == "strict"
    return field in ("annotation", "returns") or text or strict


def _put(parent: ast.AST, field: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[place] = node


def _difference(original: str, mutated: str) -> tuple[str, str]:
    changed = list(difflib.ndiff(original.splitlines(), mutated.splitlines()))
    return tuple(" / ".join(line[2:].strip() for line in changed if line.startswith(sign))
                 for sign in ("- ", "+ "))


# ---- the mistakes ------------------------------------------------------------------------------


def _variants(node: ast.AST, parent: ast.AST, field: str, alike: dict[str, set[str]]
              ) -> Iterator[ast.AST]:
    """What may stand here instead of `node`."""
    yield from (other() for other in OPERATORS.get(type(node), ()))
    if isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        others = {OTHER_NAME[node.id]} if node.id in OTHER_NAME else alike.get(node.id, set())
        yield from (ast.Name(other, ast.Load()) for other in sorted(others))
    elif isinstance(node, ast.Attribute) and node.attr in OTHER_NAME:
        yield ast.Attribute(node.value, OTHER_NAME[node.attr], node.ctx)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, DIVISIONS):
        yield node.left
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Slice):
        yield from (ast.Slice(*bounds) for bounds in ((None, node.upper), (node.lower, None)))
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        yield from (ast.Tuple(swapped, ast.Load()) for swapped in _swaps(node.elts))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(None)
    elif isinstance(node, STATEMENTS) or _stores_into(node):
        yield ast.Pass()
    if isinstance(node, ast.expr) and (field in ("test", "ifs") or isinstance(parent, ast.BoolOp)):
        yield ast.UnaryOp(ast.Not(), node)


def _stores_into(node: ast.AST) -> bool:
    """Is it `x[i] = …` or `x.y = …`? Without `name = …` mostly nothing runs at all."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Subscript,
                                                                         ast.Attribute))


def _other_constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield from (ast.Constant(node.value + step) for step in (1, -1))
    elif isinstance(node.value, float):
        yield from (ast.Constant(other) for other in (node.value * 2, node.value + 1))


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    """Two arguments swapped, one left out; a range that ends early or late; no wait."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    for swapped in _swaps(node.args) if name not in ("min", "max") else ():
        yield ast.Call(node.func, swapped, node.keywords)
    for left_out in node.keywords:
        if left_out.arg not in ("strict", "algorithm", "key"):
            yield ast.Call(node.func, node.args, [k for k in node.keywords if k is not left_out])
    if name == "range":
        for place in range(min(len(node.args), 2)):
            for op in (ast.Add(), ast.Sub()):
                args = copy.copy(node.args)
                args[place] = ast.BinOp(args[place], op, ast.Constant(1))
                yield ast.Call(node.func, args, [])
        if len(node.args) == 1:
            yield ast.Call(node.func, [ast.Constant(1), *node.args], [])
    if name == "wait":
        yield node.func.value
    if name in WRAPPERS:
        yield node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]


def _swaps(items: list[ast.expr]) -> Iterator[list[ast.expr]]:
    """Two neighbours exchanged, or two that are one apart: sendrecv's buffers, or its peers."""
    for i in range(len(items)):
        for j in range(i + 1, min(i + 3, len(items))):
            swapped = list(items)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            if not any(isinstance(item, ast.Starred) for item in (items[i], items[j])):
                yield swapped


# ---- which names may be mistaken for each other ------------------------------------------------


def _names_of_one_use(tree: ast.AST) -> dict[str, set[str]]:
    """Name → others that are bound by the same assignment, or from a value of the same form."""
    groups: dict[str, set[str]] = defaultdict(set)
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                names = [each.id for each in target.elts if isinstance(each, ast.Name)]
                groups[f"tuple {number}"].update(names)
            elif isinstance(target, ast.Name):
                groups[_make_group(node.value)].add(target.id)
        elif isinstance(node, ast.FunctionDef):
            tensors = [a.arg for a in node.args.args
                       if a.annotation is not None and "Tensor" in ast.unparse(a.annotation)]
            groups[f"arguments {number}"].update(tensors)
    alike: dict[str, set[str]] = defaultdict(set)
    for names in groups.values():
        for name in names:
            alike[name] |= names - {name}
    return alike


def _make_group(value: ast.expr) -> str:
    """`value` without its operators and constants."""
    blank = copy.deepcopy(value)
    for node in ast.walk(blank):
        if isinstance(node, ast.BinOp):
            node.op = ast.Add()
        elif isinstance(node, ast.Constant):
            node.value = 0
    return ast.dump(blank)
