"""Executes a learner's cells in the sandbox, to get the functions that they define."""

from __future__ import annotations

import ast
import sys
from codeop import Compile
from collections.abc import Iterator
from typing import Any

from dtlab.grading.frames import Frame, FrameSocket
from dtlab.grading.learner_errors import describe_error
from dtlab.grading.sandboxed_rank import Printed
from dtlab.ranks.pickling import Pickler


def serve(sock: FrameSocket, request: Frame) -> None:
    """Execute the cells of `request` and send the functions of the names that it wants. fields:
    cells, a list of [number, file, code]; names, those of the wanted functions."""
    sys.stdout = sys.stderr = Printed()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    compiler = Compile()  # knows what earlier cells imported from __future__, as in a notebook
    troubles: dict[int, str] = {}
    cell_of: dict[str, int] = {}  # a wanted name → the cell that set it last
    for number, file, code in request.fields["cells"]:
        before = dict(namespace)
        sock.send("begin", cell=number)
        for error in _execute(code, file, namespace, compiler):
            raised = describe_error(error)
            text = f"the cell raised {raised['error']}: {raised['message']}"
            troubles.setdefault(number, text.rstrip(": "))
        cell_of |= {name: number for name in request.fields["names"]
                    if namespace.get(name) is not before.get(name)}
    found, blobs = [], []
    for name, number in cell_of.items():
        try:
            if callable(namespace.get(name)):
                blobs.append(Pickler(lends=False).pickled(namespace[name]).data)
                found.append(name)
        except Exception as error:
            troubles[number] = (f"{name} can't be sent to the processes that try it ({error}); "
                                f"create what it needs inside the function")
    sock.send("done", *blobs, troubles=troubles, names=found)


def _execute(code: str, file: str, namespace: dict[str, Any], compiler: Compile
             ) -> Iterator[BaseException]:
    """Execute the statements one after the other; where one raises, the others count: a cell may
    import what is not installed here, or try out what it defines. Gives what was raised."""
    try:
        statements = ast.parse(code, file).body
    except Exception as error:
        yield error
        return
    for statement in statements:
        try:
            module: Any = ast.Module([statement], [])
            exec(compiler(module, file, "exec"), namespace)
        except BaseException as error:
            yield error
