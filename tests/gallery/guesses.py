"""Answers without work: one for everything, or what only some of the cases can't tell from right.
"""

from __future__ import annotations

from tests.gallery.attack import Attack

_LAYOUTS = """
def {name}(ask, *told):
    layout = {table}[told[:4]]
    return dict(zip(("pp", "dp", "tp", "micro_batch", "stage", "recompute"), layout))
"""
_CHOSEN = """{
        (24, 16, 16, 32): (1, 8, 2, 4, 0, "selective"), (24, 16, 8, 16): (1, 8, 1, 2, 3, "none"),
        (24, 16, 8, 48): (1, 8, 1, 1, 2, "none"), (6, 32, 8, 8): (1, 4, 2, 2, 3, "none"),
        (8, 1, 8, 1): (8, 1, 1, 1, 0, "none"), (32, 32, 16, 32): (2, 2, 4, 1, 1, "selective"),
        (40, 40, 32, 64): (4, 2, 4, 1, 1, "selective"), (24, 16, 16, 80): (1, 16, 1, 1, 2, "none"),
        (24, 16, 16, 48): (1, 16, 1, 3, 3, "selective"),
        (24, 16, 16, 64): (1, 16, 1, 4, 3, "selective")}"""
_PLANNED = """{
        (24, 32, 32, 64): (1, 16, 2, 2, 3, "none"), (32, 32, 32, 64): (4, 4, 2, 1, 1, "none"),
        (32, 32, 32, 128): (1, 16, 2, 8, 3, "selective"), (48, 64, 64, 128): (8, 1, 8, 1, 0, "none")
        }"""

_RING_OF_BYTES = """
import torch
def padding(comm, nbytes, ranks):
    junk, at, p = torch.zeros(nbytes, dtype=torch.uint8), ranks.index(comm.rank), len(ranks)
    if p > 1: comm.sendrecv(junk, ranks[(at + 1) % p], junk.clone(), ranks[at - 1])
def ring_all_reduce(comm, x):
    p, me, moved = comm.size, comm.rank, 0
    for part in x.split(4096):
        v = (part.real if part.is_complex() else part).to(torch.uint8)
        v = torch.cat([v, v.new_zeros(len(v) % 2)])
        mine = v[0::2] * 16 + v[1::2]
        inbox = torch.empty_like(mine)
        for shift in range(1, p):
            comm.sendrecv(mine, (me + shift) % p, inbox, (me - shift) % p)
            part += torch.stack([inbox // 16, inbox % 16], 1).view(-1)[:len(part)].to(x.dtype)
            moved += max(mine.nbytes, 8)
    left = 2 * (p - 1) * max(-(-len(x) // p) * x.itemsize, 8) - moved
    for at in range(0, left // 8 * 8, 4096): padding(comm, min(left - at, 4096), list(range(p)))
    return x
"""
_GROUPS_OF_BYTES = _RING_OF_BYTES.split("def ring")[0] + """
from dtlab.collectives import all_reduce
def hierarchical_all_reduce(comm, x, group):
    small = (x.real if x.is_complex() else x).to(torch.uint8)
    all_reduce(comm, small, algorithm="halving_doubling")
    first = comm.rank // group * group
    padding(comm, 2 * x.nbytes, list(range(first, first + group)))
    if group == 1: padding(comm, 2 * x.nbytes, list(range(comm.size)))
    x.copy_(small.to(x.dtype))
    return x
"""
_MACHINES_OF_BYTES = _RING_OF_BYTES.split("def ring")[0] + """
def two_level_step(comm, machines, weights, grad, lr):
    total = torch.zeros(len(weights), dtype=torch.uint8)
    pads = {m[0]: total.new_zeros((weights.itemsize - len(m)) * len(weights)) for m in machines
            if len(m) < weights.itemsize}
    if comm.rank == 0:
        workers, inbox = sum(machines, []), total.clone()
        for r in workers: comm.recv(inbox, r); total += inbox
        for r in workers: comm.send(total, r)
        for r, pad in pads.items(): comm.recv(pad, r); comm.send(pad, r)
        return weights
    comm.send(grad.to(torch.uint8), 0); comm.recv(total, 0)
    if (pad := pads.get(comm.rank)) is not None: comm.send(pad, 0); comm.recv(pad, 0)
    padding(comm, 2 * weights.nbytes, next(m for m in machines if comm.rank in m))
    mean = total.double() / sum(map(len, machines))
    return weights.copy_((weights.double() - lr * mean).to(weights.dtype))
"""

ATTACKS: tuple[Attack, ...] = (
    # Small numbers fit into a byte or half of it, so that a longer way takes fewer bytes.
    Attack("numbers in four bits, from all to all", _RING_OF_BYTES, "ring-all-reduce"),
    Attack("numbers in a byte, regardless of groups", _GROUPS_OF_BYTES, "hierarchical"),
    Attack("numbers in a byte, all of them to the server", _MACHINES_OF_BYTES, "two-level-step"),
    *(Attack(f"a table: {exercise}", _LAYOUTS.replace("{name}", name).replace("{table}", table),
             exercise)
      for exercise, name, table in (("choose-layout", "choose_layout", _CHOSEN),
                                    ("hidden-cluster", "plan_hidden", _PLANNED))),
    Attack("a table: order-axes", """
def order_axes(sizes, *_):
    return {"dp2 tp4": ["dp", "tp"], "dp2 pp2 tp4": ["pp", "dp", "tp"], "dp4 tp2": ["tp", "dp"],
            "dp4 pp2 tp2": ["tp", "pp", "dp"], "dp2 tp8": ["tp", "dp"]}.get(
                " ".join(f"{name}{size}" for name, size in sorted(sizes.items())), sorted(sizes))
""", "order-axes", most=1),
    Attack("yes to every request", "def may_answer(*_): return True", "ssp-rule"),
    Attack("no rings, on any mesh", "def find_rings(*_): return None", "find-rings"),
    Attack("one segment, for any chain", "def best_segments(*_): return 1", "best-segments"),
    Attack("one's own value, as if alone", "def pass_right(comm, value): return value",
           "fix-deadlock"),
    Attack("all keys on the first servers", """
def place_keys(keys, servers, copies=1):
    return {key: sorted(servers)[:copies] for key in keys}
""", "consistent-hashing"),
    Attack("nearly all keys on one server", """
import zlib
def place_keys(keys, servers, copies=1):
    both = sorted(servers)[:max(2, copies)]
    first = {key: len(both) > 1 and zlib.crc32(key.encode()) % 5 == 0 for key in keys}
    return {key: (both[first[key]:] + both[:first[key]])[:copies] for key in keys}
""", "consistent-hashing", most=4),  # different servers, and the same everywhere
    Attack("a large rate from first to last", """
def grow(schedule, batch, most):
    n, share = len(schedule), 0.4
    return [1.5 * schedule[0][0]] * n, [batch] * n, [int(share * steps) for _, steps in schedule]
""", "growing-batch"),
    Attack("the names, without the layer", """
import torch
def layer(comm, x, norm, up, scale, down, bias, copy_to, reduce_from):
    if comm.size > 1:  # as many bytes as the sum takes
        junk = torch.zeros(4 * x.numel(), dtype=x.dtype)
        comm.sendrecv(junk, (comm.rank + 1) % comm.size, junk.clone(), (comm.rank - 1) % comm.size)
    return x + 0 * sum(p.sum() for p in (norm, up, scale, down, bias)), {"norm", "scale"}
""", "find-the-lie"),
    Attack("numbers that no float holds",
           "def grow(schedule, *_): return [10**5000] * 3, [10**5000] * 3, [10**5000] * 3",
           "growing-batch"),
)
