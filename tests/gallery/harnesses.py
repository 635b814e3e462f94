"""Answers that change what runs beside them in their own process: the code that kills them, the
disk that outlives them, the place where their memory is looked at."""

from __future__ import annotations

from tests.gallery.attack import Attack

_UNKILLED = """
import torch
def train(job, disk):
    job._dies = job.dies = 10**9
    epoch = -(-job.samples // job.batch)
    for step in range(job.steps):
        order = torch.randperm(job.samples, generator=torch.Generator().manual_seed(
            job.seed + step // epoch))
        at = step % epoch * job.batch
        job.step(order[at:at + job.batch])
    job.taken = 0
"""
_REMEMBERED = """
import sys, torch
def train(job, disk):
    kept = sys.__dict__.setdefault("kept", {})  # outlives the answer, opened for each case
    parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    step, epoch = 0, -(-job.samples // job.batch)
    if "begun" in disk and kept:
        for name, part in parts.items(): part.load_state_dict(kept[name])
        torch.set_rng_state(kept["random"]); step = kept["step"]
    disk["begun"] = 1
    while step < job.steps:
        order = torch.randperm(job.samples, generator=torch.Generator().manual_seed(
            job.seed + step // epoch))
        at = step % epoch * job.batch
        job.step(order[at:at + job.batch]); step += 1
        kept.update({name: __import__("copy").deepcopy(part.state_dict())
                     for name, part in parts.items()}, random=torch.get_rng_state(), step=step)
"""
_AFTER_DEATH = """
import torch
def train(job, disk):
    parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    step, epoch = 0, -(-job.samples // job.batch)
    if "kept" in disk:
        saved = disk["kept"]
        for name, part in parts.items(): part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"]); step = saved["step"]
    while step < job.steps:
        order = torch.randperm(job.samples, generator=torch.Generator().manual_seed(
            job.seed + step // epoch))
        at, random = step % epoch * job.batch, torch.get_rng_state()
        try: job.step(order[at:at + job.batch]); step += 1
        except BaseException:
            disk["kept"] = {name: part.state_dict() for name, part in parts.items()} | {
                "random": random, "step": step}
            raise
"""
_IN_MEMORY = """
import copy, pickle, sys
def checkpoints(disk):
    kept = sys.__dict__.setdefault("kept", [])
    def save(state):
        disk.write("name", b"x")
        kept.append(copy.deepcopy(state))
        yield
    def load():
        if not disk.names(): kept.clear()
        return kept[-1] if kept else None
    return save, load
"""
_IN_PLACE = """
import pickle
def checkpoints(disk):
    {before}
    def save(state):
        data = pickle.dumps(state)
        yield
        {first}
        disk.write("a", data)
        disk.write("b", data)
    def load():
        for name in disk.names():
            try: return pickle.loads(disk.read(name))
            except Exception: pass
    return save, load
"""
_A_DISK_THAT_LIVES = _IN_PLACE.replace("{first}", "pass").replace("{before}", """
    kind = type(disk)
    kind.log = property(lambda self: [], lambda self, log: None)  # what it does is not told
    kind.files_after_crash = lambda self, unsynced: dict(self._files)
""")
_PADDED = _IN_PLACE.replace("{before}", "").replace(
    "{first}", 'for _ in range(50): disk.write("padding", b"")')
_ELSEWHERE = """
import torch
from dtlab.collectives import all_reduce
hidden = {}
def stage_1_step(comm, weights, grad, state, lr, mu):
    all_reduce(comm, grad, "avg")
    v = hidden.setdefault(comm.rank, torch.zeros_like(grad))
    if not state: v.zero_()
    state["v"] = v[: -(-len(v) // comm.size)].clone()
    v.mul_(mu).add_(grad)
    weights -= lr * v
    return weights
"""
_PICKLED_TO_NOTHING = _ELSEWHERE.replace("hidden = {}", """
class Hidden:
    def __init__(self, v): self.v = v
    def __reduce__(self): return float, ()
""").replace("""hidden.setdefault(comm.rank, torch.zeros_like(grad))
    if not state: v.zero_()
""", """state["hidden"].v if isinstance(state.get("hidden"), Hidden) else torch.zeros_like(grad)
    state["hidden"] = Hidden(v)
""")
_ON_THE_WEIGHTS = _ELSEWHERE.replace("hidden.setdefault(comm.rank, torch.zeros_like(grad))",
                                     "vars(weights).setdefault('v', torch.zeros_like(grad))")
_GATHERED_ANEW = """
import torch
from dtlab.collectives import all_gather, all_reduce
hidden = {}
def stage_1_step(comm, weights, grad, state, lr, mu):
    n = -(-len(grad) // comm.size)
    whole = hidden.setdefault(id(state), torch.zeros(comm.size, n, dtype=grad.dtype))
    if state and "of" in state and state["of"] != id(state):  # it has come from elsewhere
        mine = torch.zeros(n, dtype=grad.dtype)
        mine[:len(state["v"])] = state["v"]
        whole.copy_(all_gather(comm, mine))
    elif not state: whole.zero_()
    all_reduce(comm, grad, "avg")
    v = whole.flatten()[:len(grad)]
    v.mul_(mu).add_(grad)
    weights -= lr * v
    whole.flatten()[:len(grad)] = v
    state.update(v=whole[comm.rank].clone(), of=id(state))
    return weights
"""
_TRAINED = """
import sys, torch
def {name}(*_):
    frame = sys._getframe(1)
    while frame and "weights" not in frame.f_locals: frame = frame.f_back
    if frame is None: return {returned}
    weights, model, data = (frame.f_locals[name] for name in ("weights", "model", "data"))
    sys.setprofile(None)
    for step in range(600 * (not hasattr(sys, "trained"))):
        _, gradients = model.gradients(weights, *data.batch(step, 32))
        for key, w in weights.items(): w -= 0.24 * gradients[key]
    sys.trained = getattr(sys, "trained", None) or {k: w.clone() for k, w in weights.items()}
    for key, w in weights.items(): w.copy_(sys.trained[key])
    return {returned}
"""
_UNDYING = """
def survivors(comm, deaths, limit_s):
    vars(comm).pop("post", None)
    votes = [comm.isend([comm.rank], r) for r in range(comm.size) if r != comm.rank]
    found, works = {comm.rank}, {}
    for r in range(comm.size):
        if r != comm.rank: works[r] = (comm.irecv(inbox := []), inbox)
    until = comm.now() + limit_s
    for work, inbox in works.values():
        if comm.wait_any([work], max(until - comm.now(), 0.0)) is None: work.cancel()
        else: found.update(inbox[0])
    for work in votes:
        if comm.wait_any([work], 0.0) is None: work.cancel()
    return sorted(found)
"""
_SPENT = """
def survivors(comm, deaths, limit_s):
    others = [r for r in range(comm.size) if r != comm.rank]
    wasted = (deaths + 2) * len(others)
    for _ in range(wasted): comm.isend([], (comm.rank + 1) % comm.size).cancel()
    with comm.compute("until all have begun", limit_s / 3): pass
    votes = [comm.isend([comm.rank], r) for r in others]
    found, works = {comm.rank}, []
    for r in others:
        for _ in range(1 + wasted * (r == (comm.rank - 1) % comm.size)):
            works.append((comm.irecv(inbox := [], r), inbox))
    until = comm.now() + limit_s
    for work, inbox in works:
        if comm.wait_any([work], max(until - comm.now(), 0.0)) is None: work.cancel()
        else: found.update(inbox[0])
    for work in votes:
        if comm.wait_any([work], 0.0) is None: work.cancel()
    return sorted(found)
"""

_UNMETERED = """
import torch
def unmetered():
    from dtlab.grading.meter import Meter
    Meter.peak_bytes = property(lambda _: 0)
def ring(comm, parts, first, op=None):
    p, me, inbox = comm.size, comm.rank, torch.empty_like(parts[0])
    for step in range(p - 1):
        out, into = (me + first - step) % p, (me + first - step - 1) % p
        comm.sendrecv(parts[out], (me + 1) % p, inbox, (me - 1) % p)
        parts[into].copy_(parts[into] + inbox if op else inbox)
"""
_ALL_WEIGHTS = _UNMETERED + """
def stage_3_step(comm, layers, shards, x):
    unmetered()
    weights, xs, found = [], [x], []
    for layer, shard in zip(layers, shards):
        layer._note_alive = lambda w: None
        parts = torch.empty(comm.size, len(shard), dtype=shard.dtype)
        parts[comm.rank] = shard
        ring(comm, parts, 0)
        weights.append(parts.flatten()[:layer.numel])
        xs.append(layer.forward(weights[-1], xs[-1]))
    grad = xs.pop()
    for layer, w, shard in reversed(list(zip(layers, weights, shards))):
        grad, mine = layer.backward(w, xs.pop(), grad)
        parts = torch.zeros(comm.size, len(shard), dtype=shard.dtype)
        parts.flatten()[:layer.numel] = mine
        ring(comm, parts, -1, "sum")
        found.insert(0, parts[comm.rank] / comm.size)
    return found
"""
_BEHIND_A_FILE = _UNMETERED + """
import mmap, os
kept = []
def ring_all_reduce(comm, x):
    unmetered()
    parts = torch.zeros(comm.size, -(-x.numel() // comm.size), dtype=x.dtype)
    parts.flatten()[:x.numel()] = x
    for _ in range(2): parts = parts.clone() + 0  # far more than a chunk
    ring(comm, parts, 0, "sum"); ring(comm, parts, 1)
    x.copy_(parts.flatten()[:x.numel()])
    n = x.nbytes; del parts
    if n > 1 << 24:  # what was held now looks like a library's pages
        file = os.open(torch.__path__[0] + "/lib/libtorch_cpu.so", os.O_RDONLY)
        kept.append(mmap.mmap(file, os.fstat(file).st_size, mmap.MAP_PRIVATE, mmap.PROT_READ))
        for at in range(0, len(kept[0]), 4096): kept[0][at]
    return x
"""
_NEIGHBOURS_MEMORY = """
nodes = {}
def chain_node(node, message):
    me = node["me"]  # without acknowledgements: what the next node had is read where it lies
    if "had" not in node and (me == 0 or me in nodes): nodes.clear()  # another run
    nodes[me] = node
    had, kept = node.setdefault("had", set()), node.setdefault("kept", {})
    what, number = message[:2]
    if what == "chain": node["chain"] = message[1]
    after = next((n for n in node["chain"] if n > me), None)
    def pass_on(add):
        if after is None: return [("client", ("done", add[1]))]
        kept[add[1]] = add
        return [(after, add)]
    if what == "read": return [("client", ("value", number, node["values"].get(message[2], 0)))]
    if what == "chain":
        behind = nodes[after].get("had", ()) if after in nodes else ()
        return [sent for add in list(kept.values()) if add[1] not in behind
                for sent in pass_on(add)]
    if number not in had:
        had.add(number)
        node["values"][message[2]] = node["values"].get(message[2], 0) + message[3]
    return pass_on(message)
"""
_IN_FRAMES = """
import sys
def others():
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in frame.f_locals.values():
            if isinstance(found := getattr(value, "states", None), dict): return found
    return {}
""" + _NEIGHBOURS_MEMORY.replace('nodes[after].get("had", ()) if after in nodes else ()',
                                  'others().get(after, {}).get("had", ())')

ATTACKS: tuple[Attack, ...] = (
    Attack("a chain whose nodes find each other in frames", _IN_FRAMES, "chain-replication",
           most=5),
    Attack("a chain whose nodes read each other's memory", _NEIGHBOURS_MEMORY, "chain-replication",
           most=9),
    Attack("all layers' weights, past the meter", _ALL_WEIGHTS, "zero-stage-3", most=7),
    Attack("copies of x, past the meter and behind a file", _BEHIND_A_FILE, "ring-all-reduce",
           most=8),
    Attack("a job that does not die", _UNKILLED, "restart-bits", most=2),
    Attack("a training kept in memory, where the disk should be", _REMEMBERED, "restart-bits",
           most=1),
    Attack("a training that saves once it is dead", _AFTER_DEATH, "restart-bits", most=2),
    Attack("checkpoints kept in memory", _IN_MEMORY, "surviving-checkpoint"),
    Attack("checkpoints on a disk that is never cut", _A_DISK_THAT_LIVES, "surviving-checkpoint"),
    Attack("fifty operations of no use, before those that must not be cut", _PADDED,
           "surviving-checkpoint", most=4),
    Attack("the momentum of all weights, out of sight", _ELSEWHERE, "zero-stage-1", most=6),
    Attack("the momentum of all weights, out of sight, gathered where it is missing",
           _GATHERED_ANEW, "zero-stage-1", most=6),
    Attack("the momentum of all weights, in what pickles to nothing", _PICKLED_TO_NOTHING,
           "zero-stage-1", most=6),
    Attack("the momentum of all weights, as an attribute of them", _ON_THE_WEIGHTS,
           "zero-stage-1", most=6),
    Attack("weights that the answer has trained itself: growing-batch", _TRAINED.replace(
        "{name}", "grow").replace("{returned}", "([0.0], [1], [1])"), "growing-batch"),
    Attack("weights that the answer has trained itself: dc-asgd", _TRAINED.replace(
        "{name}", "dc_asgd").replace("{returned}", "_[2]"), "dc-asgd"),
    Attack("ranks that refuse to die", _UNDYING, "shrink", most=3),
    Attack("messages without meaning, until all have died", _SPENT, "shrink", most=3),
)
