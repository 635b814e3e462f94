"""`check`: what the learner calls below an exercise."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from dtlab.errors import ConfigError
from dtlab.grading.case import Submission
from dtlab.grading.exercise import find_exercise
from dtlab.grading.judge import grade_answer, in_own_process
from dtlab.grading.rank_server import RankServer
from dtlab.grading.report import Report
from dtlab.grading.sandbox import pickled_by_value
from dtlab.grading.submitted import assigned_names, defined_names
from dtlab.ranks.own_code import is_own, own_module


def check(
    exercise_id: str,
    submission: Callable[..., Any] | Submission,
    show: bool = True,
    seed: int = 0,
) -> Report:
    """Try `submission` (your function, not the result of calling it) on the exercise's cases.

    Shows a table of what was tried, what came, what was expected, bytes and rounds against the
    bound, points, and hints; returns the same as a `Report` (`.points`, `.rows`, `.to_dict()`).
    Nothing that the function does (a loop without an end, exit, a flood of prints) stops the check,
    which takes a second or two. It runs as you, in processes of its own, and says so once: check
    what you trust; other people's answers are for `dtlab grade`, which has a sandbox. `seed` draws
    other sizes and values. Raises `ConfigError` for an unknown exercise, something that isn't a
    function, or a seed that isn't a whole number.
    """
    exercise = find_exercise(exercise_id)
    missing = [] if isinstance(submission, Submission) else names_missing_in_class(submission)
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed is a whole number, 0 or more, not {seed!r}")
    if not isinstance(submission, Submission):
        submission = make_submission(submission, exercise.function)
    report = Report.from_dict(in_own_process(_judge, submission, exercise.id, seed))
    if show:
        report.show()
        if missing:
            print(f"In a class there is no {' and no '.join(missing)}: of other cells only "
                  f"functions, classes and imports of installed modules count. Write it in the "
                  f"answer's own cell.")
        _say_whom_it_trusts()
    return report


@functools.cache  # once in a kernel
def _say_whom_it_trusts() -> None:
    print("(check runs the function with your rights, as any cell does: check only code that you "
          "trust. For other people's notebooks there is dtlab grade.)")


def _judge(submission: Submission, exercise_id: str, seed: int) -> dict[str, Any]:
    exercise = find_exercise(exercise_id)
    with RankServer("none", exercise.library) as server:
        return grade_answer(server, submission, exercise, seed).to_dict()


def make_submission(function: Callable[..., Any], name: str) -> Submission:
    """Return `function`, pickled for the processes that will run it."""
    if not callable(function):
        raise ConfigError(
            f"check needs your function itself, not {type(function).__name__} {function!r:.60}; "
            f"write check(…, {name}) without calling it"
        )
    try:
        # With its module, unless that is an installed one: a learner's file may not be found there.
        pickled = pickled_by_value(function, own_module(function)).data
    except Exception as error:
        raise ConfigError(
            f"{name} can't be sent to the processes that try it: {error}; create what it needs "
            f"inside the function"
        ) from error
    try:
        folder = os.getcwd()
    except OSError:  # it has been deleted
        folder = "/"
    return Submission(pickled, list(sys.path), folder, _cell_sources(function))


def names_missing_in_class(function: Callable[..., Any]) -> list[str]:
    """The names that `function`, or a helper of it, takes from the notebook's variables, where its
    own cell sets none, or from a module that lies beside the notebook."""
    found: dict[str, None] = {}
    kept, assigned = _top_names()
    helpers, seen = [getattr(function, "func", function)], set()
    kept |= _set_beside(helpers[0])
    while helpers:
        helper = helpers.pop()
        code = getattr(helper, "__code__", None)
        if code is None or code in seen or os.path.exists(code.co_filename):
            continue
        seen.add(code)
        for name in (_globals_of(code) | _names_in_def(code)) & helper.__globals__.keys():
            value = helper.__globals__[name]
            module = value if isinstance(value, types.ModuleType) else own_module(value)
            plain = name in assigned or not (isinstance(value, types.ModuleType) or callable(value))
            if (module is not None and is_own(module)) or (plain and name not in kept):
                found[name] = None
            else:
                helpers.append(getattr(value, "func", value))
    return sorted(found)


def _set_beside(function: Callable[..., Any]) -> set[str]:
    """The names that the function's own cell sets: all, where its text is unknown (%%time)."""
    lines = linecache.getlines(getattr(getattr(function, "__code__", None), "co_filename", ""))
    with contextlib.suppress(SyntaxError):
        if lines:
            return assigned_names(ast.parse("".join(lines)))
    return set(getattr(function, "__globals__", ()))


def _top_names() -> tuple[set[str], set[str]]:
    """Return the names that the notebook's cells define, as a class does, and others assigned."""
    kept, assigned = set[str](), set[str]()
    for file in [file for file in linecache.cache if not os.path.exists(file)]:
        with contextlib.suppress(SyntaxError):
            for statement in ast.parse("".join(linecache.getlines(file))).body:
                names = defined_names(statement)
                kept |= names
                if "*" in names and isinstance(statement, ast.ImportFrom):
                    kept |= vars(sys.modules.get(statement.module or "", types)).keys()
                assigned |= set() if names else assigned_names(statement)
    return kept, assigned


def _globals_of(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(inner) for inner in code.co_consts
                         if isinstance(inner, types.CodeType)))


def _names_in_def(code: types.CodeType) -> set[str]:
    """The names in decorators, defaults and annotations of a function of a cell."""
    with contextlib.suppress(SyntaxError):
        for s in ast.walk(ast.parse("".join(linecache.getlines(code.co_filename)))):
            if isinstance(s, ast.FunctionDef) and s.name == code.co_name:
                parts = [*s.decorator_list, s.args, *([s.returns] if s.returns else [])]
                return {node.id for part in parts for node in ast.walk(part)
                        if isinstance(node, ast.Name)}
    return set()


def _cell_sources(function: Callable[..., Any]) -> dict[str, str]:
    """The text of the notebook cell that defines `function`, for tracebacks."""
    inner = function.func if isinstance(function, functools.partial) else function
    file = getattr(getattr(inner, "__code__", None), "co_filename", "")
    if not file or os.path.exists(file):
        return {}
    return {file: "".join(linecache.getlines(file))}
