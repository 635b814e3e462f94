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

ATTACKS: tuple[Attack, ...] = (
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
