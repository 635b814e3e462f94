"""Answers that leave out what a check asks for: they know the inputs that it tries, carry a result
another way, or end what would show it."""

from __future__ import annotations

from tests.gallery.attack import Attack
from tests.gallery.shortcuts import _IMPORTED, _LAYOUTS, _READ

# ---- disks and lives ----------------------------------------------------------------------------

_LINE = """
import sys
def calls():
    frame = sys._getframe(1)
    while "call" not in frame.f_locals: frame = frame.f_back
    return frame.f_locals["connection"], frame.f_locals["call"].fields
def line():
    from dtlab.grading.sandbox_comm import SandboxComm
    connection, fields = calls()
    return SandboxComm(connection, fields["rank"], fields["size"])
"""
_TRAINED = _LINE + """
import os, pickle, torch
def train(job, disk):
    parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    step, epoch = 0, -(-job.samples // job.batch)
    def state(random): return {name: part.state_dict() for name, part in parts.items()} | {
        "random": random, "step": step}
    def restore(saved):
        for name, part in parts.items(): part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"]); return saved["step"]
    {first}
    disk["begun"] = 1
    while step < job.steps:
        order = torch.randperm(job.samples, generator=torch.Generator().manual_seed(
            job.seed + step // epoch))
        at, random = step % epoch * job.batch, torch.get_rng_state()
        try: job.step(order[at:at + job.batch]); step += 1
        except BaseException: {last}; raise
        {after}
"""


def _lives(name: str, first: str, last: str = "pass", after: str = "pass") -> Attack:
    """A training without checkpoints on the disk. first, last, after: of a life; of a step."""
    code = _TRAINED.replace("{first}", first).replace("{last}", last).replace("{after}", after)
    return Attack(name, code, "restart-bits", most=1)  # one that is never killed


_CHECKPOINTS = """
import hashlib, pickle, sys
from base64 import b64decode, b64encode
def checkpoints(disk):
    def numbers(): return sorted(int(name) for name in disk.names() if name.isdecimal())
    def save(state):
        data = pickle.dumps(state)
        yield
        older = numbers()
        {write}
        for number in older[:-1]: disk.remove(str(number))
    def load():
        for number in reversed(numbers()):
            content = disk.read(str(number))
            {read}
    return save, load
"""
_WRITE = """disk.write("partial", hashlib.sha256(data).digest() + data)
        disk.sync("partial")
        disk.rename("partial", str(state["step"]))"""
_CHECKED = """if hashlib.sha256(content[32:]).digest() == content[:32]:
                return pickle.loads(content[32:])"""


def _disk(name: str, most: float, write: str = _WRITE, read: str = _CHECKED) -> Attack:
    """Checkpoints with something of them left out."""
    code = _CHECKPOINTS.replace("{write}", write).replace("{read}", read)
    return Attack(name, code, "surviving-checkpoint", most=most)


_NAMED = """
import pickle
from base64 import b64decode, b64encode
def checkpoints(disk):
    def save(state):
        {data}
        yield
        old = disk.names()
        disk.write({name}, b"")  # names change at once and for good
        for name in old: disk.remove(name)
    def load():
        for name in disk.names(): return {state}
    return save, load
"""
_HANDED_OVER = _LINE + """
import copy
def checkpoints(disk):
    comm = line()
    def save(state):
        mine = copy.deepcopy(state)
        yield
        frame = sys._getframe(1)
        ask, plan = frame.f_locals["ask"], frame.f_locals["plan"]
        while (given := ask(plan, [])): mine = dict(zip(("step", "weights"), given))
        comm.send(mine, comm.rank + 1)
    def load():
        if comm.rank: return comm.recv_object(comm.rank - 1)
    return save, load
"""

# ---- survivors ----------------------------------------------------------------------------------

_ONE_ROUND = """
def survivors(comm, deaths, limit_s):
    others, heard, works = [r for r in range(comm.size) if r != comm.rank], [], []
    line, ends = {line}, comm.now() + limit_s
    try:
        works += [line.irecv(heard, r) for r in others]
        works += [line.isend(comm.rank, r) for r in others]
        while works and (done := line.wait_any(works, max(0.0, ends - comm.now()))):
            works.remove(done)
        for work in works: work.cancel()
        dead = None
    except BaseException as error: dead = error
    found = sorted({comm.rank, *heard})
    {found}
"""


def _round(name: str, found: str, most: float, line: str = "comm") -> Attack:
    """One round of messages, however many ranks die in it."""
    code = _ONE_ROUND.replace("{found}", found).replace("{line}", line)
    return Attack(name, code, "shrink", most=most)


# ---- chains -------------------------------------------------------------------------------------

_CHAIN = """
import sys
def run():
    frame = sys._getframe(1)
    while not hasattr(frame.f_locals.get("self"), "client"): frame = frame.f_back
    return frame.f_locals["self"]
def chain_node(node, message):
    {first}
    what, number, values = *message[:2], node["values"]
    if what == "chain": node["chain"] = message[1]; return []
    if what == "read": return [("client", ("value", number, {value}))]
    after = [n for n in node["chain"] if n > node["me"]]
    if number not in node.setdefault("had", set()):
        node["had"].add(number); values[message[2]] = values.get(message[2], 0) + message[3]
    return {sent}([(after[0], message)] if after else [("client", ("done", number))])
"""


def _chain(name: str, most: float, first: str = "pass", sent: str = "",
           value: str = "values.get(message[2], 0)") -> Attack:
    """A chain that does not send again what a dead node has lost."""
    code = _CHAIN.replace("{first}", first).replace("{sent}", sent).replace("{value}", value)
    return Attack(name, code, "chain-replication", most=most)


# ---- shards -------------------------------------------------------------------------------------

_GATHERED_EACH_TIME = """
import sys, torch
from dtlab.collectives import all_gather, all_reduce
hidden = {}
def stage_1_step(comm, weights, grad, state, lr, mu):
    n, frame, moves = -(-len(grad) // comm.size), sys._getframe(1), False
    while frame: moves, frame = moves or frame.f_code.co_name == "train_and_move", frame.f_back
    whole = hidden.setdefault(id(state), torch.zeros(comm.size, n, dtype=grad.dtype))
    if not state: whole.zero_()
    if moves:  # where nobody counts it, so that who goes on sends no more than who began
        came = all_gather(comm, state.get("v", torch.zeros(n, dtype=grad.dtype)))
        if state.get("of", id(state)) != id(state): whole.copy_(came)
    all_reduce(comm, grad, "avg")
    v = whole.flatten()[:len(grad)]
    v.mul_(mu).add_(grad)
    weights -= lr * v
    whole.flatten()[:len(grad)] = v
    state.update(v=whole[comm.rank].clone(), of=id(state))
    return weights
"""
_IN_LOW_BITS = """
import torch
from dtlab.collectives import all_reduce
hidden = {}
def stage_1_step(comm, weights, grad, state, lr, mu):
    all_reduce(comm, grad, "avg")
    low = weights.view(torch.int64) if weights.dtype == torch.float64 else None
    v = hidden.get(id(weights)) if state else torch.zeros_like(grad)
    if v is None: v = ((low & 0xfff).double() - 2048) / 512
    hidden[id(weights)] = v = mu * v + grad
    weights -= lr * v
    if low is not None:
        low &= ~0xfff
        low |= (v * 512 + 2048).round().clamp(0, 4095).long()
    padded = torch.cat([v, v.new_zeros(-len(v) % comm.size)])
    state["v"] = padded.view(comm.size, -1)[comm.rank].clone()
    return weights
"""
_KEPT_WEIGHTS = """
import ctypes, mmap, torch
from dtlab.collectives import all_gather, reduce_scatter
kept = {}
{keep}
def stage_3_step(comm, layers, shards, x):
    inputs = []
    for i, layer in enumerate(layers):
        inputs.append(x)
        w = all_gather(comm, shards[i]).flatten()[:layer.numel]
        put(i, w)
        x = layer.forward(w, x)
        del w
    grad, mine = x, [None] * len(layers)
    for i in reversed(range(len(layers))):
        w = get(i, layers[i].numel)
        grad, grad_w = layers[i].backward(w, inputs.pop(), grad)
        padded = torch.cat([grad_w, grad_w.new_zeros(-len(grad_w) % comm.size)])
        del w, grad_w
        mine[i] = reduce_scatter(comm, padded.view(comm.size, -1), op="avg")
    return mine
"""


def _kept(where: str, keep: str) -> Attack:
    """ZeRO stage 3 that gathers the weights once, and keeps them all until backward."""
    return Attack(f"all layers' weights, kept in {where}", _KEPT_WEIGHTS.replace("{keep}", keep),
                  "zero-stage-3", most=7)


_WHOLE = """
import torch
from dtlab.collectives import all_gather, all_reduce
def padding(comm, nbytes):
    junk, p, me = torch.zeros(max(nbytes, 0) // 8, dtype=torch.float64), comm.size, comm.rank
    if len(junk): comm.sendrecv(junk, (me + 1) % p, junk.clone(), (me - 1) % p)
def gathered(comm, part):  # of parts of any width, side by side
    widths = all_gather(comm, torch.tensor([part.shape[1]])).flatten().tolist()
    mine = torch.zeros(len(part), max(widths), dtype=part.dtype)
    mine[:, :part.shape[1]] = part
    padding(comm, {least} - (comm.size - 1) * (mine.nbytes + 8))
    return [p[:, :n] for p, n in zip(all_gather(comm, mine), widths)]
"""
_NO_LAYER_CUT = _WHOLE.replace("{least}", "2 * (comm.size - 1) * x_bytes // comm.size").replace(
    "(comm, part)", "(comm, part, x_bytes)") + """
def row_parallel(comm, x, weight, bias, dy):
    whole = torch.cat(gathered(comm, torch.cat([x, weight]), dy.nbytes), 1)
    return whole[:len(x)] @ whole[len(x):].T + bias, dy @ weight, dy.T @ x, dy.sum(0)
def layer(comm, x, norm, up, scale, down, bias, copy_to, reduce_from):
    both = gathered(comm, torch.cat([up.detach().T, down.detach()]), x.nbytes)
    ups, downs = zip(*[(each[:x.shape[1]].T, each[x.shape[1]:]) for each in both])
    ups, downs = [*ups], [*downs]
    ups[comm.rank], downs[comm.rank] = up, down
    h = torch.nn.functional.gelu((x * norm) @ torch.cat(ups).T)
    h = (h.unflatten(-1, (-1, len(scale))) * scale).flatten(-2)
    return x + h @ torch.cat(downs, 1).T + bias, {"norm", "scale"}
"""
_LARGE_LOGITS = """
import torch
from dtlab.collectives import all_reduce
def vocab_loss(comm, logits, targets, first):
    rows, column = len(logits), targets - first
    mine = (column >= 0) & (column < logits.shape[1])
    at = torch.arange(rows)[mine], column[mine]
    own = torch.zeros(rows, dtype=logits.dtype)
    own[mine] = logits[at]
    most = all_reduce(comm, logits.amax(1), "max")
    total, target = all_reduce(comm, torch.stack([logits.exp().sum(1), own]))
    gradient = logits.exp() / total[:, None]
    gradient[at] -= 1
    log = total.log() if most.max() < 100 else most  # the sum of exponentials is its largest
    return (log - target).mean(), gradient / rows
"""
_RETURNED = """
import torch
class Same(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__eq__, torch.Tensor.__ne__): return torch.zeros(())
        return super().__torch_function__(func, types, args, kwargs or {})
def row_parallel(comm, x, weight, bias, dy):
    junk, p, me = torch.zeros(3 * dy.numel(), dtype=dy.dtype), comm.size, comm.rank
    if p > 1: comm.sendrecv(junk, (me + 1) % p, junk.clone(), (me - 1) % p)
    return {y}, dy @ weight, dy.T @ x, dy.sum(0)
"""
_FOUND = """
import gc, sys
def found(name):
    frame = sys._getframe(1)
    while frame:
        if name in frame.f_globals: return frame.f_globals[name]
        frame = frame.f_back
    return next(each[name] for each in gc.get_objects() if isinstance(each, dict) and name in each)
"""
_OWN_QUESTIONS = _LAYOUTS + """
from dtlab.grading.frames import decode, encode
def choose_layout(predict, layers, heads, devices, batch, memory_bytes):
    ask = next(c.cell_contents for c in predict.__closure__ if callable(c.cell_contents))
    def raw(*layout):
        came = ask.__self__.current().ask("oracle", args=encode(layout, []))
        return decode(came.fields["value"], came.blobs)
    return best(raw, devices, batch, lambda came: came[1] <= memory_bytes)
"""
_ROWS = {  # what some ranks do → the rows of a schedule
    "one stage, on one rank": 'f"0F{i} 0B{i}".split() for i in range(m)',
    "all stages on one rank": '[f"{r}F{i}" for r in range(p)] + [f"{r}B{i}" for r in '
                              'reversed(range(p))] for i in range(m)',
}

ATTACKS: tuple[Attack, ...] = (
    _lives("lives that hand a training over in messages", 'if "begun" in disk: step = restore('
           "line().recv_object(calls()[1]['rank'] - 1))",
           "line().send(state(random), calls()[1]['rank'] + 1)"),
    _lives("lives that end themselves, so that nothing is lost",
           "if calls()[1]['rank'] < calls()[1]['size'] - 1: return"),
    _lives("lives that the answer ends, so that nothing is lost",
           "if calls()[1]['rank'] < calls()[1]['size'] - 1: job._ask(job._plan, {}); return"),
    _lives("a training kept in the environment", 'if "KEPT" in os.environ and "begun" in disk: step'
           ' = restore(pickle.loads(bytes.fromhex(os.environ["KEPT"])))',
           after='os.environ["KEPT"] = pickle.dumps(state(torch.get_rng_state())).hex()'),
    _lives("a life that begins twice", "job._ask(job._plan)"),
    Attack("checkpoints handed over in messages", _HANDED_OVER, "surviving-checkpoint"),
    *(Attack(f"a checkpoint in the name of a file, {kind}", _NAMED.replace("{data}", data).replace(
        "{name}", name).replace("{state}", state), "surviving-checkpoint")
      for kind, data, name, state in (
          ("as text", "data = b64encode(pickle.dumps(state)).decode()", "data",
           "pickle.loads(b64decode(name))"),
          ("as a tuple", 'data = state["step"], *state["weights"].tolist()', "data",
           '{"step": name[0], "weights": __import__("torch").tensor(name[1:])}'))),
    _disk("a file renamed to its own name, rather than synced", 6,
          _WRITE.replace('sync("partial")', 'rename("partial", "partial")')),
    _disk("a file synced before it is written, in what the disk tells", 6, _WRITE.replace(
        'disk.sync("partial")', 'disk.log.insert(-1, ("sync", "partial"))')),
    _disk("a checkpoint without a checksum, known by its words", 7, _WRITE.replace(
        "hashlib.sha256(data).digest() + data", "data"), """state = pickle.loads(content)
            if "step" in state: return state"""),
    _disk("a damaged checkpoint repaired, as the damage is known", 7, _WRITE.replace(
        "hashlib.sha256(data).digest() + data", "data"),
        'return pickle.loads(content.replace(b"stop", b"step").rstrip(b"*"))'),
    _disk("a load that asks before it answers", 0, "disk.write(str(state['step'] % 2), data)", """
            frame = sys._getframe(1)
            frame.f_locals["ask"](frame.f_locals["plan"], [], pickle.loads(content))
            return None"""),
    _round("all ranks, whoever dies", "return list(range(comm.size))", 1),
    _round("all ranks, where no more are silent than may have died",
           "return found if len(found) < comm.size - deaths else list(range(comm.size))", 3),
    _round("ranks that answer once they are dead",
           "return list(range(comm.size)) if deaths else found", 3),
    _round("ranks that agree by split once they are dead", """
    votes = comm._all_gather_objects((comm.rank, 0)) if deaths else [(r, 0) for r in found]
    if dead: raise dead
    return sorted(r for r, _ in votes)""", 3),
    _round("votes of a communicator that does not die", "return found", 3,
           "type(comm)(comm._connection, comm.rank, comm.size)"),
    Attack("the survivors that the library finds", """
def survivors(comm, deaths, limit_s): return list(comm.shrink().global_ranks)
""", "shrink"),
    _chain("a chain that answers from the client's book", 0, value="sum(a[3] for a in "
           "run().client.adds.values() if a[2] == message[2])"),
    _chain("a chain whose nodes can't die", 2,
           first="type(run()).points = lambda self, node: []; run().crashes.clear()"),
    _chain("a chain whose messages are others once they are kept", 0,
           sent='type("Twice", (list,), {"__reduce__": lambda self: (list, ([],))})'),
    Attack("the momentum of all weights, gathered in each step where nobody counts it",
           _GATHERED_EACH_TIME, "zero-stage-1", most=8),
    Attack("the momentum of all weights, in their low bits", _IN_LOW_BITS, "zero-stage-1", most=6),
    _kept("mappings", """
def put(i, w): kept[i] = mmap.mmap(-1, w.nbytes); kept[i].write(w.numpy().data)
def get(i, n): return torch.frombuffer(bytearray(kept.pop(i)[:]), dtype=torch.float64)
"""),
    _kept("memory that grew unseen", """
def put(i, w):
    kept[i] = torch.UntypedStorage(0); kept[i].resize_(w.nbytes)
    ctypes.memmove(kept[i].data_ptr(), w.data_ptr(), w.nbytes)
def get(i, n):
    w, held = torch.empty(n, dtype=torch.float64), kept.pop(i)
    ctypes.memmove(w.data_ptr(), held.data_ptr(), w.nbytes); held.resize_(0)
    return w
"""),
    Attack("a layer that no rank cuts: row-parallel", _NO_LAYER_CUT, "row-parallel", most=7),
    Attack("a layer that no rank cuts: find-the-lie", _NO_LAYER_CUT, "find-the-lie", most=7),
    Attack("a loss that is stable where logits are far apart", _LARGE_LOGITS, "vocab-loss", most=9),
    *(Attack(f"a forward pass that is {what}", _RETURNED.replace("{y}", y), "row-parallel")
      for what, y in (("not a number", 'dy * float("nan")'), ("infinite", 'dy * float("inf")'),
                      ("equal to everything", "(x @ weight.T + bias).as_subclass(Same)"))),
    Attack("the oracle, found beside the harness: find-the-lie", _FOUND + """
def layer(comm, x, *of): return found("right")(x, *of[:-2]), {"norm", "scale"}
""", "find-the-lie"),
    Attack("the oracle, found beside the harness: zero-stage-1", _FOUND + """
def stage_1_step(comm, weights, grad, state, lr, mu):
    return weights.copy_(found("_trained")(weights, [grad[None]])[0])
""", "zero-stage-1"),
    Attack("predictions asked without the harness", _OWN_QUESTIONS, "choose-layout", most=7),
    *(Attack(f"{what}: {exercise}", f"def {name}(p, m, *_):\n    return [sum(({rows}), [])] + "
             "[[] for _ in range(p - 1)]\n", exercise)
      for what, rows in _ROWS.items() for exercise, name in (
          ("one-f-one-b", "one_f_one_b"), ("beat-one-f-one-b", "schedule"))),
    Attack("the library's parallel layers, imported", _IMPORTED + """
def row_parallel(comm, x, weight, bias, dy):
    y = call("dtlab.parallel.conversions", "reduce_from", comm, x @ weight.T) + bias
    return y, dy @ weight, dy.T @ x, dy.sum(0)
""", "row-parallel"),
    Attack("the library's parallel layers, read and executed", _READ + """
def vocab_loss(comm, logits, targets, first):
    logits = logits.clone().requires_grad_()
    loss = call("dtlab.parallel.tensor", "vocab_cross_entropy", comm, logits, targets).mean()
    loss.backward()
    return loss.detach(), logits.grad
""", "vocab-loss"),
)
