"""Answers that are right without the work that they are asked for: what ranks tell each other for
nothing, the library's own functions, draws found by trying, questions that nobody counts."""

from __future__ import annotations

from tests.gallery.attack import Attack
from tests.gallery.notebooks import Notebook, code_cell

_ALL_REDUCE = """
import torch
from dtlab import Send, Recv
{how}
def ring_all_reduce(comm, x):
    mine = [int(v.real) for v in x.reshape(-1).tolist()]
    try:
        rows = shared(comm, mine)
        x.copy_(torch.tensor([sum(each) for each in zip(*rows)]).to(x.dtype).reshape(x.shape))
    finally:
        p, me = comm.size, comm.rank  # as many bytes as a ring would send, of nothing
        junk = torch.zeros(max(-(-x.numel() // p), 1), dtype=x.dtype)
        for _ in range(2 * (p - 1)):
            comm.sendrecv(junk, (me + 1) % p, junk.clone(), (me - 1) % p)
    return x
"""
_TOLD = """
def shared(comm, mine):
    rows = [mine] * comm.size
    for src in range(comm.size):
        for dst in range(comm.size):
            if comm.rank == src != dst:
                for v in mine: tell(comm, dst, v)
            elif comm.rank == dst != src:
                rows[src] = [hear(comm, src) for _ in mine]
    return rows
"""


_MEET = """
def meeting(comm, works, dst):  # all are there; all are of no more use
    pair = comm.subgroup([comm.rank, dst])
    pair.send(torch.empty(0), 1); pair.recv(torch.empty(0), 1)
    for work in works: work.cancel()
"""


def told(name: str, source: str, most: float = 0) -> Attack:
    """An all-reduce whose numbers are told by tell(comm, dst, v), heard by hear(comm, src)."""
    return Attack(f"numbers that travel {name}", _ALL_REDUCE.replace("{how}", _TOLD + source),
                  "ring-all-reduce", most=most)


_LIBRARY = {  # exercise → (module, an answer by it)
    "ring-all-reduce": ("dtlab.collectives", "def ring_all_reduce(comm, x):\n"
                        "    return {call}('dtlab.collectives', 'all_reduce', comm, x)\n"),
    "one-f-one-b": ("dtlab.parallel", "def one_f_one_b(p, m):\n    return [[str(a) for a in row] "
                    "for row in {call}('dtlab.parallel.pipeline', 'one_f_one_b', p, m).rows]\n"),
    "beat-one-f-one-b": ("dtlab.parallel", "def schedule(p, m, F, B, W, comm, limit):\n"
                         "    return [[str(a) for a in row] for row in {call}("
                         "'dtlab.parallel.pipeline', 'zb_h1', p, m).rows]\n"),
    "sharded-store": ("dtlab.ps", "def sharded_step(comm, weights, grads, servers, lr):\n"
                      "    return {call}('dtlab.ps', 'join', comm, weights, servers=servers)\n"),
    "ssp-rule": ("dtlab.ps", "def may_answer(request, clock, clocks, staleness):\n"
                 "    return {call}('dtlab.ps.consistency', 'SSP', staleness).may_answer("
                 "request, clock, clocks)\n"),
    "choose-layout": ("dtlab.parallel.planner", "def choose_layout(predict, layers, heads, "
                      "devices, batch, memory_bytes):\n    return {call}("
                      "'dtlab.parallel.planner', 'plan', layers, devices)[0]\n"),
    "best-interval": ("dtlab.cost", "def best_interval(goal, nodes, node_mttf_h, save_s, restart_s"
                      "):\n    t = {call}('dtlab.cost.failures', 'young_s', save_s, "
                      "node_mttf_h * 3600 / nodes)\n    return node_mttf_h * 3600 / nodes, t, "
                      "{call}('dtlab.reliability', 'goodput', t)\n"),
    "find-rings": ("dtlab.topology.cycles", "def find_rings(ranks, links):\n    return {call}("
                   "'dtlab.topology.cycles', 'edge_disjoint_cycles', links, 2)\n"),
}
_IMPORTED = """
from importlib import import_module
def call(module, name, *args, **options):
    return getattr(import_module(module), name)(*args, **options)
"""
_READ = """
import glob, os, site, sys, types, dtlab
def call(module, name, *args, **options):
    part = module.split(".")[1]
    for folder in [os.path.dirname(dtlab.__file__)] + [
            each + "/dtlab" for each in [*site.getsitepackages(), *sys.path]]:
        for file in glob.glob(folder + "/" + part + "/**/*.py*", recursive=True):
            code = open(file).read()
            if "def " + name in code:
                made = types.ModuleType(module); made.__package__ = module
                exec(compile(code, file, "exec"), vars(made))
                return getattr(made, name)(*args, **options)
    raise LookupError(name)
"""
_IN_A_THREAD = _IMPORTED + """
import threading
def ring_all_reduce(comm, x):
    connection = comm._connection  # which knows its streams by their threads
    own = threading.get_ident()
    def run():
        connection._streams[0].thread = threading.get_ident()
        try: call("dtlab.collectives", "all_reduce", comm, x)
        finally: connection._streams[0].thread = own
    thread = threading.Thread(target=run); thread.start(); thread.join()
    return x
"""
_BEGUN = _IMPORTED + """
def ring_all_reduce(comm, x):
    comm.begin(lambda stream: call("dtlab.collectives", "all_reduce", stream, x)).wait()
    return x
"""
_PATCHED = _IMPORTED + """
def ring_all_reduce(comm, x):
    kind = type(comm)
    kind.sendrecv_ = lambda self, x: call("dtlab.collectives", "all_reduce", self, x)
    comm.sendrecv_(x)
    return x
"""
_UNDER_ITS_NAME = """
import dtlab, os, sys
def ring_all_reduce(comm, x):
    sys.setprofile(None)
    file = os.path.join(os.path.dirname(dtlab.__file__), "comm.py")
    space = {}
    exec(compile("from dtlab.collectives import all_reduce\\ndef go(comm, x): return "
                 "all_reduce(comm, x, algorithm='ring')", file, "exec"), space)
    return space["go"](comm, x)
"""
_BARE = """
def hierarchical_all_reduce(comm, x, group):
    return {call}("dtlab.collectives.all_reduce_topology", "hierarchical", comm, x, "sum", group)
"""
_BY_VALUE = """
def pack():
    import cloudpickle, importlib, sys
    for name in ("dtlab.{part}", "dtlab.{part}.cycles", "dtlab.{part}.all_reduce"):
        try: cloudpickle.register_pickle_by_value(importlib.import_module(name))
        except Exception: pass
@(lambda made: (pack(), made)[1])
def helper(): pass
"""


def _helper(source: str) -> Attack:
    """By value, from a helper cell, where chapter 06's first exercise has the collectives."""
    def edit(notebook: Notebook) -> None:
        notebook["cells"].insert(0, code_cell(source))

    return Attack("the library's, pickled by value in a helper cell", """
from dtlab.topology.cycles import edge_disjoint_cycles
def find_rings(ranks, links):
    return edge_disjoint_cycles(links, 2)
""", "find-rings", edit=edit)


def _napping_cells(notebook: Notebook) -> None:
    for number in range(10):
        notebook["cells"].insert(0, code_cell(
            f"import time\n@(lambda f: time.sleep(4))\ndef nap{number}(): pass"))
    notebook["cells"].append(code_cell(
        "@(lambda f: [None for _ in iter(int, 1)])\ndef endless(): pass"))


_LAYOUTS = """
import gc, itertools, sys
names = "pp", "dp", "tp", "micro_batch", "stage", "recompute"
def best(ask, devices, batch, fits):
    found = {}
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for pp, dp, tp in itertools.product(sizes, sizes, sizes):
        if pp * dp * tp != devices: continue
        for n in range(1, batch // dp + 1):
            if batch % (dp * n): continue
            for stage in range(4):
                for recompute in ("none", "selective", "full"):
                    layout = pp, dp, tp, n, stage, recompute
                    came = ask(*layout)
                    if came and fits(came): found[layout] = came
    return dict(zip(names, min(found, key=lambda of: found[of])))
def reset(value):
    frame = sys._getframe()
    while frame:
        for each in [*frame.f_locals.values(), *gc.get_objects()]:
            fields = getattr(each, "__dict__", None)
            if isinstance(fields, dict):
                for name in ("asked", "calls", "count", "runs"):
                    if name in fields:
                        try: fields[name] = value
                        except Exception: pass
        frame = frame.f_back
"""
_LAYERS = "from dtlab.collectives import all_reduce\n"

ATTACKS: tuple[Attack, ...] = (
    told("in time", """
def tell(comm, dst, v):
    work = comm.irecv(torch.empty(0), dst)
    comm.wait_any([work], 10.0 * v); work.cancel()
    comm.send(torch.empty(0), dst)
def hear(comm, src):
    began = comm.now(); comm.recv(torch.empty(0), src)
    return int((comm.now() - began - 1) // 10)
"""),
    told("in computing", """
def tell(comm, dst, v):
    comm.recv(torch.empty(0), dst)
    with comm.compute("nothing", 10.0 * v): pass
    comm.send(torch.empty(0), dst)
def hear(comm, src):
    comm.send(torch.empty(0), src)
    began = comm.now(); comm.recv(torch.empty(0), src)
    return int((comm.now() - began - 1) // 10)
"""),
    told("in the shapes of nothing", _MEET + """
def tell(comm, dst, v): meeting(comm, [comm.isend(torch.empty(0, v), dst)], dst)
def hear(comm, src):
    pair = comm.subgroup([src, comm.rank]); pair.recv(torch.empty(0), 0)
    try: comm.irecv(torch.empty(0, 99), src).wait()
    except Exception as error: v = int(str(error).split("(0, ")[1].split(")")[0])
    pair.send(torch.empty(0), 0)
    return v
"""),
    told("in labels", _MEET + """
def tell(comm, dst, v): meeting(comm, [comm.labelled(f"{v})").isend(torch.empty(0), dst)], dst)
def hear(comm, src):
    pair = comm.subgroup([src, comm.rank]); pair.recv(torch.empty(0), 0)
    try: comm.irecv(torch.empty(0), src).wait()
    except Exception as error: v = int(str(error).split("is in ")[1].split(")")[0])
    pair.send(torch.empty(0), 0)
    return v
"""),
    told("in whether messages fit", _MEET + """
def tell(comm, dst, v):
    meeting(comm, [comm.isend(torch.empty(0, 1), dst) for _ in range(v)], dst)
def hear(comm, src):
    pair = comm.subgroup([src, comm.rank]); pair.recv(torch.empty(0), 0)
    v, work, other = 0, comm.irecv(torch.empty(0, 2), src), comm.begin(lambda stream: None)
    while comm.wait_any([work, other]) is work:
        work.cancel(); work = comm.irecv(torch.empty(0, 2), src); v += 1
    work.cancel(); other.wait(); pair.send(torch.empty(0), 0)
    return v
"""),
    told("in which of two sends comes first", """
def groups(src, dst): return [src, dst], [dst, src]
def tell(comm, dst, v):
    for bit in range(4):
        pairs = [comm.subgroup(each) for each in groups(comm.rank, dst)]
        for pair in pairs[::-1] if v >> bit & 1 else pairs:
            pair.send(torch.empty(0), 1 - pair.rank)
def hear(comm, src):
    v = 0
    for bit in range(4):
        pairs = [comm.subgroup(each) for each in groups(src, comm.rank)]
        works = [pair.irecv(torch.empty(0)) for pair in pairs]
        done = works.index(comm.wait_any(works))
        works[1 - done].wait(); v += done << bit
    return v
""", most=5),  # of which each bit counts eight bytes
    Attack("numbers that travel in colors and keys", _ALL_REDUCE.replace("{how}", """
def shared(comm, mine):
    rows = [[] for _ in range(comm.size)]
    for i in range(0, len(mine), 6):  # three digits in each of two numbers
        a, b = (int("".join(map(str, mine[i + j:i + j + 3])) or 0) for j in (0, 3))
        for row, votes in zip(rows, comm._all_gather_objects((a, b))):
            row += [int(d) for n, left in zip(votes, (mine[i:i + 3], mine[i + 3:i + 6]))
                    for d in str(n)[:len(left)]]
    return rows
"""), "ring-all-reduce"),
    Attack("numbers that travel in small colors and keys, six or eight digits of them",
           _ALL_REDUCE.replace("{how}", """
def shared(comm, mine):
    n, base, number, digits = len(mine), 2 * comm.size + 2, 0, []
    for v in mine: number = 9 * number + v - 1
    for _ in range(8): digits.append(number % base - comm.size); number //= base
    if number or not n: return [mine] * comm.size
    say, heard = [None if d == comm.size + 1 else d for d in digits], [[] for _ in range(comm.size)]
    for i in range(0, 8, 2):
        for row, vote in zip(heard, comm._all_gather_objects((say[i], say[i + 1]))): row += vote
    rows = []
    for row in heard:
        for d in reversed(row): number = number * base + (
            2 * comm.size + 1 if d is None else d + comm.size)
        rows.append([number // 9 ** i % 9 + 1 for i in reversed(range(n))]); number = 0
    return rows
"""), "ring-all-reduce"),
    Attack("the others' inputs, of a seed of torch that fits one's own", _ALL_REDUCE.replace(
        "{how}", """
def shared(comm, mine):
    for seed in range(300):
        g = torch.Generator().manual_seed(seed)
        rows = [torch.randint(1, 10, (len(mine),), generator=g).tolist() for _ in range(comm.size)]
        if rows[comm.rank] == mine: return rows
    return [mine]
"""), "ring-all-reduce"),
    Attack("the others' inputs, of a small seed that fits one's own", _ALL_REDUCE.replace(
        "{how}", """
def shared(comm, mine):
    from dtlab.grading.draws import numbers
    for dtype in (torch.float32, torch.float64, torch.int64):
        for seed in range(300):
            def row(r): return numbers((seed, comm.size, len(mine), dtype, r), (len(mine),), dtype,
                                       9).long().tolist()
            if row(comm.rank) == mine: return [row(r) for r in range(comm.size)]
    return [mine]
"""), "ring-all-reduce"),
    *(Attack(f"the library's {module}, imported: {exercise}", _IMPORTED + code.replace(
        "{call}", "call"), exercise) for exercise, (module, code) in _LIBRARY.items()),
    *(Attack(f"the library's {module}, read and executed: {exercise}", _READ + code.replace(
        "{call}", "call"), exercise) for exercise, (module, code) in _LIBRARY.items()),
    Attack("the library's, from a thread", _IN_A_THREAD, "ring-all-reduce"),
    Attack("the library's, from what begin begins", _BEGUN, "ring-all-reduce"),
    Attack("the library's, as a method of the communicator", _PATCHED, "ring-all-reduce"),
    Attack("the library's, under the name of a file of the package", _UNDER_ITS_NAME,
           "ring-all-reduce"),
    *(Attack(f"the library's hierarchical all-reduce, without its label, {how}",
             found + _BARE.replace("{call}", "call"), "hierarchical")
      for how, found in (("imported", _IMPORTED), ("read", _READ))),
    _helper(_BY_VALUE.replace("{part}", "topology")),
    Attack("layers that take no time", _LAYERS + """
def overlapped_backward(comm, layers):
    for layer in layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, (int, float)): setattr(layer, name, 0)
    works = []
    for layer in reversed(layers):
        layer.backward()
        works.append(comm.begin(all_reduce, layer.grad, "avg"))
    for work in works: work.wait()
""", "overlapped-backward"),
    Attack("gradients that are read before backward", _LAYERS + """
import gc, torch
def overlapped_backward(comm, layers):
    for layer in layers:
        held = [*vars(layer).values()]
        for each in [*vars(layer).values(), type(layer).backward, *gc.get_objects()]:
            for cell in getattr(each, "__closure__", None) or ():
                held.append(cell.cell_contents)
            held += [*getattr(each, "args", ())] if type(each).__name__ == "partial" else []
        layer.grad = next(x for x in held if isinstance(x, torch.Tensor))
        all_reduce(comm, layer.grad, "avg")
""", "overlapped-backward"),
    Attack("gradients of all layers at once, in streams", _LAYERS + """
def overlapped_backward(comm, layers):
    groups = [comm.subgroup(range(comm.size))] + [
        comm.split(0) for _ in layers[1:]]
    def one(stream, layer):
        layer.grad = layer._compute(layer._number)
        all_reduce(stream, layer.grad, "avg")
    for work in [g.begin(one, layer) for g, layer in zip(groups, reversed(layers))]: work.wait()
""", "overlapped-backward"),
    Attack("gradients from the first layer on", _LAYERS + """
def overlapped_backward(comm, layers):
    for layer in layers: layer.backward()
    for layer in layers: all_reduce(comm, layer.grad, "avg")
""", "overlapped-backward"),
    Attack("predictions that nobody counts: choose-layout", _LAYOUTS + """
def choose_layout(predict, layers, heads, devices, batch, memory_bytes):
    chosen = best(predict, devices, batch, lambda came: came[1] <= memory_bytes)
    reset(0)
    return chosen
""", "choose-layout", most=7),
    Attack("predictions read in closures and frames", _LAYOUTS + """
def choose_layout(predict, layers, heads, devices, batch, memory_bytes):
    for each in gc.get_objects():
        if type(each).__name__ in ("_lru_cache_wrapper", "Layout", "Prediction"):
            return best(each, devices, batch, lambda came: came[1] <= memory_bytes)
        if isinstance(each, dict) and len(each) > 50 and all(
                isinstance(k, tuple) and len(k) == 6 for k in list(each)[:9]):
            return dict(zip(names, min(each, key=each.get)))
    return {}
""", "choose-layout"),
    Attack("questions that fill the referee's memory", """
def choose_layout(predict, *_):
    ask = predict.__closure__[1].cell_contents if callable(
        predict.__closure__[1].cell_contents) else predict.__closure__[0].cell_contents
    ask(1, "x" * 1000, 1, 5 * 10**6, 0, "full")
    return {}
""", "choose-layout"),
    Attack("a bandwidth read in frames and memory", """
import gc, sys
def plan_hidden(run, layers, heads, devices, batch):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, float) and v > 1e9]
        frame = frame.f_back
    found += [x for x in gc.get_objects() if type(x).__name__ in ("Topology", "Link", "Wire")]
    found += [v for t in gc.get_objects() if type(t) is tuple and len(t) == 8
              for v in t if isinstance(v, float) and v > 1e9]
    if not found: raise LookupError("no bandwidth")
    pp = 1 if found[0] > 1e11 else 2
    return dict(pp=pp, dp=devices // pp // 8, tp=8, micro_batch=1, stage=0, recompute="full")
""", "hidden-cluster"),
    Attack("runs that nobody counts", _LAYOUTS + """
def plan_hidden(run, layers, heads, devices, batch):
    chosen = best(run, devices, batch, lambda came: True)
    reset(0)
    return chosen
""", "hidden-cluster", most=6),
    Attack("cells that nap, and one without end", "def hello(comm): return None",
           edit=_napping_cells),
    Attack("returns 16 megabytes from every rank", """
import torch
def ring_all_reduce(comm, x): return torch.ones(4_000_000)
""", "ring-all-reduce"),
    Attack("returns 120 megabytes of bytes from every rank", """
import torch
def ring_all_reduce(comm, x): x.data = torch.zeros(120_000_000, dtype=torch.uint8)
""", "ring-all-reduce"),
    Attack("sums by what split asks for, where collectives may be called", """
import torch
def row_parallel(comm, x, weight, bias, dy):
    y = x @ weight.T
    votes = comm._all_gather_objects(y.reshape(-1).tolist())
    y = sum(torch.tensor(v, dtype=y.dtype).reshape(y.shape) for v in votes)
    if comm.size > 1:  # as many bytes as an all-reduce, of nothing
        junk = torch.zeros(2 * (comm.size - 1) * y.numel() // comm.size, dtype=y.dtype)
        comm.sendrecv(junk, (comm.rank + 1) % comm.size, junk.clone(), (comm.rank - 1) % comm.size)
    return y + bias, dy @ weight, dy.T @ x, dy.sum(0)
""", "row-parallel"),
    Attack("says three million characters", """
def hello(comm):
    raise type("E" * 1_000_000, (Exception,), {})("x" * 3_000_000)
"""),
)
