"""Answers that look for what was not given to them: cases, solutions, memory of others."""

from __future__ import annotations

from tests.gallery.attack import MARK, RIGHT, Attack, hello

_TELL = "raise ValueError('found ' + repr(found)[:300]) if found else ValueError('nothing')"
_CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
"""

ATTACKS: tuple[Attack, ...] = (
    Attack("calls the solution that it finds in the course", """
import glob, json, os, sys
def ring_all_reduce(comm, x):
    for folder in [*sys.path, os.getcwd(), os.path.dirname(os.__file__), "/"]:
        for file in glob.glob(folder + "/solutions/05*.ipynb"):
            for cell in json.load(open(file))["cells"]:
                if "def ring_all_reduce" in "".join(cell["source"]):
                    space = {"Comm": type(comm), "torch": __import__("torch")}
                    exec("".join(cell["source"]), space)
                    return space["ring_all_reduce"](comm, x)
    return x
""", "ring-all-reduce"),
    hello("imports the checks and their oracles",
          "from dtlab.grading.exercises import hello_ranks",
          "cases = [case for check in hello_ranks.EXERCISE.build(0) for case in check.cases]",
          "return cases[0].wanted.returns[comm.rank]"),
    hello("reads what mistakes leave behind", "import dtlab, glob, os",
          "place = os.path.dirname(dtlab.__file__)",
          "return open(glob.glob(place + '/grading/exercises/*.json')[0]).read()"),
    hello("reads the mistakes beside the solutions", "import glob, os, dtlab",
          "root = os.path.dirname(os.path.dirname(dtlab.__file__))",
          "return open(root + '/solutions/mistakes/hello_ranks.py').read()"),
    hello("looks for cases in the memory that it was forked from", "import gc",
          "kinds = 'Case', 'Check', 'Outcome'",
          "found = [x for x in gc.get_objects() if type(x).__name__ in kinds]",
          "return found[0].expected"),
    Attack("takes what it needs from the frames that call it", """
import sys
def ring_all_reduce(comm, x):
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, (list, tuple)) and len(value) == comm.size > 1:
                if all(hasattr(v, "shape") and v.shape == x.shape for v in value):
                    x.copy_(sum(value))
                    return x
        frame = frame.f_back
    return x
""", "ring-all-reduce"),
    hello("reads its parent's memory in /proc", "import os",
          "open(f'/proc/{os.getppid()}/mem', 'rb').read(10)",
          "return open(f'/proc/{os.getppid()}/environ').read()"),
    hello("writes into its parent's memory", "import os",
          "open(f'/proc/{os.getppid()}/mem', 'r+b').write(b'x')"),
    hello("traces its parent", "if libc.ptrace(16, os.getppid(), 0, 0) == 0:",
          f"    {RIGHT}", before=_CALL),
    hello("reads its parent's memory by process_vm_readv",
          "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]",
          "buffer = ctypes.create_string_buffer(8)",
          "mine, its = V(ctypes.addressof(buffer), 8), V(id(None), 8)",
          "both = ctypes.byref(mine), 1, ctypes.byref(its), 1, 0",
          "if libc.process_vm_readv(os.getppid(), *both) == 8:",
          f"    {RIGHT}", before=_CALL),
    hello("tells what it sees of the environment and the home folder", "import os, glob",
          f"found = [v for v in os.environ.values() if '{MARK}' in v]",
          "found += glob.glob(os.path.expanduser('~') + '/.*') + glob.glob('/root/*')", _TELL),
    hello("tells other submissions that it finds", "import os",
          "found = [os.path.join(folder, file) for folder, _, files in os.walk('/')",
          "         for file in files if file.endswith('.ipynb')]", _TELL),
    hello("tells the hidden inputs", "print('inputs', comm.size)",
          "raise ValueError(f'inputs {comm.size}')"),
    hello("writes into the package", "import dtlab, os",
          "place = os.path.dirname(dtlab.__file__)",
          f"open(place + '/{MARK}.py', 'w').write('harm')"),
    hello("truncates the course's notebooks", "import dtlab, os, glob",
          "root = os.path.dirname(os.path.dirname(dtlab.__file__))",
          f"open(root + '/solutions/{MARK}.ipynb', 'w').write('harm')"),
)
