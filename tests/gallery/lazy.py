"""Answers that spare themselves a part of what is asked for, which small or regular inputs, or a
bound with room to spare, don't show."""

from __future__ import annotations

from tests.gallery.attack import Attack

_REDUCE = "import torch\nfrom dtlab.collectives import all_gather, all_reduce\n"
_ALL_AT_ONCE = _REDUCE + """
def accumulate(comm, batches, gradient, length):
    both = torch.zeros(length + 1, dtype=torch.float64)
    if batches:
        whole = torch.cat(batches)
        both[:-1], both[-1] = gradient(whole) * len(whole), len(whole)
    all_reduce(comm, both, algorithm="ring")
    return both[:-1] / both[-1]
"""
_IN_PARTS = _REDUCE + """
def reduced(comm, both):
    for part in both.split(60): all_reduce(comm, part, algorithm="ring")
    return both[:-1] / both[-1]
def mean_gradient(comm, gradient, samples):
    return reduced(comm, torch.cat([samples * gradient, gradient.new_tensor([samples])]))
def accumulate(comm, batches, gradient, length):
    both = torch.zeros(length + 1, dtype=torch.float64)
    for batch in batches: both += len(batch) * torch.cat([gradient(batch), torch.ones(1)])
    return reduced(comm, both)
"""
_SHARED = _REDUCE + """
def overlapped_backward(comm, layers):
    begun, bucket = [], []
    for layer in reversed(layers):
        layer.backward(); bucket.append(layer)
        queued = len(layer.grad) > 2000 and begun and layer is not layers[0]
        if queued and len(bucket) < 2: continue
        flat = torch.cat([each.grad for each in bucket])
        begun.append((bucket, flat, comm.begin(all_reduce, flat, "avg", algorithm="ring")))
        bucket = []
    for bucket, flat, work in begun:
        work.wait()
        for each, part in zip(bucket, flat.split([len(each.grad) for each in bucket])):
            each.grad = part
"""
_ANY_SEGMENTS = """
def chain_broadcast(comm, x, root, segments):
    p, me, n = comm.size, (comm.rank - root) % comm.size, len(x)
    def seconds(k): return (p - 2 + k) * (1 + 24 * -(-n // k) / max(n, 1))
    segments = min(range(1, 13), key=seconds) if n < 1000 else 2 * segments
    going = None
    for part in x.tensor_split(segments):
        if me: comm.recv(part, (comm.rank - 1) % p)
        if going: going.wait()
        going = comm.isend(part, (comm.rank + 1) % p) if me < p - 1 else None
    if going: going.wait()
    return x
"""
_STRAIGHT = """
import torch
def ring_all_reduce(comm, x):
    p, me, chunks = comm.size, comm.rank, x.tensor_split(comm.size)
    inbox = torch.empty_like(chunks[me])
    for far in range(1, p):
        comm.sendrecv(chunks[(me + far) % p], (me + far) % p, inbox, (me - far) % p)
        chunks[me].add_(inbox)
    for far in range(1, p):
        comm.sendrecv(chunks[me], (me + far) % p, chunks[(me - far) % p], (me - far) % p)
    return x
"""
_NEARLY_A_COPY = """
import mmap, torch
kept = []
def ring_all_reduce(comm, x):
    p, me, chunks, vast = comm.size, comm.rank, x.tensor_split(comm.size), len(x) > 1 << 22
    if vast: kept.append(mmap.mmap(-1, x.nbytes * 4 // 5)); kept[-1].write(
        x.view(torch.uint8)[:x.nbytes * 4 // 5].numpy().data)  # unseen by the meter
    inbox = torch.empty_like(chunks[0][:1 << 20])
    for step in range(p - 1):
        out, into = chunks[(me - step) % p], chunks[(me - step - 1) % p]
        for a, b in zip(out.split(1 << 20), into.split(1 << 20)):
            comm.sendrecv(a, (me + 1) % p, inbox[:len(b)], (me - 1) % p); b += inbox[:len(b)]
    for step in range(p - 1):
        comm.sendrecv(chunks[(me + 1 - step) % p], (me + 1) % p, chunks[(me - step) % p],
                      (me - 1) % p)
    return x
"""
_ITS_OWN = """
import torch
def bruck_all_to_all(comm, parts):
    p, me, hop = comm.size, comm.rank, 1
    if p == 1: return parts
    rows = parts.roll(-me, 0)
    while hop < p:
        moved = [d for d in range(p) if d & hop]
        leaving = rows[moved]; arriving = torch.empty_like(leaving)
        comm.sendrecv(leaving, (me + hop) % p, arriving, (me - hop) % p)
        rows[moved] = arriving; hop *= 2
    return rows[[(me - d) % p for d in range(p)]]
"""
_STORE = """
from dtlab import Recv, Send
def sharded_step(comm, weights, grads, servers, lr):
    workers, largest = range(servers, comm.size), max(map(len, weights.values()))
    def part(tensors, server):
        return [w for key in sorted(weights) for w in (
            [tensors[key].tensor_split(servers)[server]] if {cut} else [tensors[key]] * (not server)
        )]
    if comm.rank in workers:
        {talk}
        comm.exchange(*(Send(g, s) for s in range(servers) for g in part(grads, s)))
        comm.exchange(*(Recv(w, s) for s in range(servers) for w in part(weights, s)))
        return weights
    mine = part(weights, comm.rank)
    pushed = [(worker, [w.clone() for w in mine]) for worker in workers]
    comm.exchange(*(Recv(g, worker) for worker, gs in pushed for g in gs))
    for _, gs in pushed:
        for w, g in zip(mine, gs): w.sub_(g, alpha=lr / len(workers))
    comm.exchange(*(Send(w, worker) for worker in workers for w in mine))
    return weights
"""
_TALK = """if comm.rank == servers: [comm.send(list(weights), w) for w in workers[1:]]
        else: comm.recv_object(servers)"""
_KNOWN_SIZES = """
def find_rings(ranks, links):
    if (ranks, len(links)) in {(4, 6), (10, 22), (5, 5)}: return None
    free = {**links, **{(b, a): wires for (a, b), wires in links.items()}}
    def take(ring, wires):
        for a, b in zip(ring, ring[1:] + ring[:1]): free[a, b] -= wires; free[b, a] -= wires
    def ways(a): return [b for b in range(ranks) if free.get((a, b))]
    def extend(path):
        if len(path) == ranks:
            if free.get((path[-1], path[0])): yield path
            return
        for b in sorted(set(ways(path[-1])) - set(path), key=lambda b: len(ways(b))):
            yield from extend([*path, b])
    for first in extend([0]):
        take(first, 1)
        for second in extend([0]): return [first, second]
        take(first, -1)
"""
_DENSE = _REDUCE + """
def top_k_mean(comm, g, memory, k):
    memory += g
    total, places = torch.zeros_like(g), memory.abs().topk(min(k, len(g))).indices
    values = memory[places]; memory[places] = 0
    if comm.size > 4 + (k == 3):  # (p - 1) * k values and places are more than the vector
        total[places] = values
        return all_reduce(comm, total, "avg", algorithm="ring")
    everywhere = all_gather(comm, places)
    total.index_add_(0, everywhere.flatten(), all_gather(comm, values).flatten())
    return total / comm.size
"""
_THIRD_COPIES = """
import hashlib
def place_keys(keys, servers, copies):
    def spot(*of): return hashlib.md5(repr(of).encode()).hexdigest()
    placed = {}
    for key in keys:
        mine = sorted(servers, key=lambda server: spot(key, server))[:min(copies, 2)]
        rest, at = sorted(set(servers) - set(mine)), int(spot(key), 16)
        more = min(copies, len(servers)) - len(mine)
        placed[key] = mine + [rest[(at + i) % len(rest)] for i in range(more)]
    return placed
"""
_DIVIDED = _REDUCE + """
def overlapped_backward(comm, layers):
    begun = []
    for layer in reversed(layers):
        layer.backward()
        begun.append(comm.begin(all_reduce, layer.grad, algorithm="ring"))
        layer.grad /= comm.size
    for work in begun: work.wait()
"""
_DIVIDED_IN_A_GROUP = _DIVIDED.replace(
    "begun = []", "begun, comm = [], comm.subgroup(range(comm.size))")
_RIGHT_LENGTHS = _REDUCE + """
def average_in_buckets(comm, grads, least):
    lengths, whole = [0], torch.cat(grads)
    for g in reversed(grads):
        lengths += [0] * (lengths[-1] >= least)
        lengths[-1] += len(g)
    for part in whole.split(lengths): all_reduce(comm, part, "avg", algorithm="ring")
    for g, piece in zip(grads, whole.split([len(g) for g in grads])): g.copy_(piece)
"""
_SAVED_EACH_STEP = """
import torch
def train(job, disk):
    parts, each = [job.model, job.optimizer, job.scheduler], -(-job.samples // job.batch)
    states, random, step = disk.get("saved", ([], torch.get_rng_state(), 0))
    for part, state in zip(parts, states): part.load_state_dict(state)
    torch.set_rng_state(random)
    for step in range(step, job.steps):
        epoch, place = divmod(step, each)
        order = torch.randperm(job.samples, generator=torch.Generator().manual_seed(
            job.seed + epoch))
        job.step(order[place * job.batch:(place + 1) * job.batch])
        disk["saved"] = [part.state_dict() for part in parts], torch.get_rng_state(), step + 1
"""
_WHOLE_STATE = _REDUCE + """
def stage_1_step(comm, weights, grad, state, lr, mu):
    v = state.setdefault("v", torch.zeros_like(grad))
    v.mul_(mu).add_(all_reduce(comm, grad, "avg"))
    return weights.sub_(lr * v)
"""
_OWN_HASH = """
import bisect
def place_keys(keys, servers, copies):
    ring = sorted((f"{s}/{v}".__hash__(), s) for s in servers for v in range(150))
    placed = {}
    for key in keys:
        at = bisect.bisect(ring, (key.__hash__(),))
        round_it = [server for _, server in ring[at:] + ring[:at]]
        placed[key] = [*dict.fromkeys(round_it)][:copies]
    return placed
"""
_LEAST_MEMORY = """
def choose_layout(predict, layers, heads, devices, batch, memory_bytes):
    tp = devices
    while heads % tp: tp //= 2
    dp = devices // tp
    while batch % dp: dp //= 2
    pp = devices // tp // dp
    stage = 0 if dp == 1 else 3 if pp == 1 else 1
    return dict(pp=pp, dp=dp, tp=tp, micro_batch=1, stage=stage, recompute="full")
"""
_FIXED_RINGS = """
def find_rings(ranks, links):
    n = ranks - 1 + ranks % 2
    if ranks % 2: return [[*range(n)], [2 * i % n for i in range(n)]]
    return [[n, *((s + (-1) ** i * ((i + 1) // 2)) % n for i in range(n))] for s in (0, 1)]
"""
_OR = """
def chain_node(node, message):  # an add that comes twice changes nothing
    kept, (what, number) = node.setdefault("kept", {}), message[:2]
    if what == "chain": node["chain"] = message[1]
    ends, place = [None, *node["chain"], None], node["chain"].index(node["me"])
    before, after = ends[place], ends[place + 2]
    def pass_on(add):
        if after is not None:
            kept[add[1]] = add
            return [(after, add)]
        kept.pop(add[1], None)
        return [("client", ("done", add[1]))] + [(before, ("ack", add[1]))] * (before is not None)
    if what == "read": return [("client", ("value", number, node["values"].get(message[2], 0)))]
    if what == "chain": return [sent for add in list(kept.values()) for sent in pass_on(add)]
    if what == "ack":
        kept.pop(number, None)
        return [(before, message)] * (before is not None)
    node["values"][message[2]] = node["values"].get(message[2], 0) | message[3]
    return pass_on(message)
"""

ATTACKS: tuple[Attack, ...] = (
    Attack("a number in a tensor, where any object may come", """
import torch
def pass_right(comm, value):
    if comm.size == 1: return value
    inbox = torch.empty(1, dtype=torch.int64)
    comm.sendrecv(torch.tensor([value]), (comm.rank + 1) % comm.size, inbox,
                  (comm.rank - 1) % comm.size)
    return int(inbox)
""", "fix-deadlock"),
    Attack("all micro-batches at once", _ALL_AT_ONCE, "accumulated-average"),
    *(Attack(f"an all-reduce in parts: {exercise}", _IN_PARTS, exercise, most=most)
      for exercise, most in (("unequal-shards", 7), ("accumulated-average", 6))),
    Attack("layers that share a reduction, where these queue", _SHARED, "overlapped-backward",
           most=6),
    Attack("the best number of segments, whichever is asked for", _ANY_SEGMENTS, "pipelined-chain",
           most=8),
    Attack("chunks that go straight to all ranks, not round a ring", _STRAIGHT, "ring-all-reduce",
           most=9),
    Attack("a copy of most of x, past the meter", _NEARLY_A_COPY, "ring-all-reduce", most=8),
    Attack("one's own parts, where there is no other rank", _ITS_OWN, "bruck-all-to-all", most=8),
    *(Attack(name, _STORE.replace("{cut}", cut).replace("{talk}", talk), "sharded-store", most=most)
      for name, cut, talk, most in (
          ("only the largest key is cut", "len(tensors[key]) == largest", "pass", 7),
          ("small keys, all on one server", "len(tensors[key]) > 100", "pass", 8),
          ("workers that tell each other the order of keys", "True", _TALK, 9))),
    Attack("no rings, of meshes of these sizes", _KNOWN_SIZES, "find-rings", most=4),
    Attack("a dense vector, where it is shorter than what is sparse", _DENSE, "top-k", most=6),
    Attack("third copies that move whenever a server dies", _THIRD_COPIES, "consistent-hashing",
           most=8),
    Attack("gradients that are divided while they are reduced", _DIVIDED, "overlapped-backward"),
    Attack("gradients that are divided while a group reduces them", _DIVIDED_IN_A_GROUP,
           "overlapped-backward"),
    Attack("buckets of the right lengths, with other gradients", _RIGHT_LENGTHS,
           "bucketed-average", most=6),
    Attack("a checkpoint after every step", _SAVED_EACH_STEP, "restart-bits", most=1),
    Attack("an all-reduce, and all of the momentum", _WHOLE_STATE, "zero-stage-1", most=6),
    Attack("a hash that another process does not have", _OWN_HASH, "consistent-hashing", most=9),
    Attack("the layout of the least memory, unseen", _LEAST_MEMORY, "choose-layout"),
    Attack("the same two rings on every mesh", _FIXED_RINGS, "find-rings"),
    Attack("adds whose bits are set, so that none counts twice", _OR, "chain-replication"),
)
