"""Right answers in other styles than the course's own: they must earn all points, too."""

from __future__ import annotations

import pickle
import zlib

import networkx as nx
import numpy as np
import torch

from dtlab import Recv, Send
from dtlab.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from dtlab.grading.exercises.best_segments import chain_s


def sides(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def takes_turns(comm, value):  # right: somebody receives first
    right, left = sides(comm)
    if comm.size == 1:
        return value
    if comm.rank % 2:
        came = comm.recv_object(left)
        comm.send(value, right)
        return came
    comm.send(value, right)
    return comm.recv_object(left)


def posts_both(comm, x):  # right as well
    right, left = sides(comm)
    into = x.clone()
    if comm.size > 1:
        works = [comm.irecv(into, left), comm.isend(x, right)]
        for work in works:
            work.wait()
    return into


def lowest_bit_tree(comm, x, root):
    """As the library does it."""
    p, bit = comm.size, 1
    me = (comm.rank - root) % p
    while bit < p and not me & bit:
        bit *= 2
    if me:
        comm.recv(x, (me - bit + root) % p)
    below = [1 << k for k in range(bit.bit_length() - 1) if me + (1 << k) < p]
    for each in reversed(below):
        comm.send(x, (me + each + root) % p)
    return x


def posts_and_waits(comm, x, root):  # right as well: rank by rank halved, all by isend and irecv
    low, high = 0, comm.size
    me = (comm.rank - root) % comm.size
    while high - low > 1:
        middle = (low + high + 1) // 2
        if me == low:
            comm.isend(x, (middle + root) % comm.size).wait()
        elif me == middle:
            comm.irecv(x, (low + root) % comm.size).wait()
        low, high = (low, middle) if me < middle else (middle, high)


def one_ahead(comm, x, root, segments):  # right as well: the next receive is posted before sending
    p, place = comm.size, (comm.rank - root) % comm.size
    ahead, behind = (comm.rank + 1) % p, (comm.rank - 1) % p
    parts = x.tensor_split(segments)
    coming = comm.irecv(parts[0], behind) if place else None
    for i, part in enumerate(parts):
        if coming is not None:
            coming.wait()
            coming = comm.irecv(parts[i + 1], behind) if i + 1 < len(parts) else None
        if place < p - 1:
            comm.send(part, ahead)


def best_by_search(p, n, a, b):  # right as well
    k, step = 1, 1
    while chain_s(p, n, a, b, k + step) < chain_s(p, n, a, b, k):
        k, step = k + step, max(1, k // 200)
    return k


def with_a_dictionary(comm, parts):  # right as well: each part travels with its name
    p, me = comm.size, comm.rank
    held = {(me, dst): parts[dst].clone() for dst in range(p)}
    hop = 1
    while hop < p:
        names = [(src, (src + d) % p) for d in range(p) if d & hop
                 for src in [(me - (d & (hop - 1))) % p]]
        arriving = [((src + hop) % p, (dst + hop) % p) for src, dst in names]
        arriving = [((src - 2 * hop) % p, (dst - 2 * hop) % p) for src, dst in arriving]
        out = torch.stack([held.pop(name) for name in names])
        into = torch.empty_like(out)
        comm.sendrecv(out, (me + hop) % p, into, (me - hop) % p)
        held.update(zip(arriving, into, strict=True))
        hop *= 2
    return torch.stack([held[src, me] for src in range(p)])


def folded(comm, x, core_part):
    """Rank p′ + i is folded into rank i."""
    core = 1 << comm.size.bit_length() - 1
    me, extra = comm.rank, comm.size - core
    if me >= core:
        comm.send(x, me - core)
        comm.recv(x, me - core)
        return x
    if me < extra:
        comm.recv(inbox := torch.empty_like(x), core + me)
        comm.accumulate_(x, inbox)
        del inbox
    core_part(comm, x, list(range(core)))
    if me < extra:
        comm.send(x, core + me)
    return x


def by_bits_and_nearest_first(comm, x):
    """Halves of halves chosen by the bits of the rank, as in binary blocks: 1, 2, 4, … apart."""
    def core_part(comm, x, members):
        place, pieces = members.index(comm.rank), [(0, len(x))]
        inbox = torch.empty_like(x[: -(-len(x) // 2)])
        bits = range(len(members).bit_length() - 1)
        for bit in bits:
            low, high = pieces[-1]
            middle = (low + high + 1) // 2
            halves = [(low, middle), (middle, high)]
            (a, b), (c, d) = halves[place >> bit & 1], halves[1 - (place >> bit & 1)]
            partner = members[place ^ 1 << bit]
            comm.exchange(Send(x[c:d], partner), Recv(inbox[: b - a], partner))
            x[a:b] += inbox[: b - a]
            pieces.append((a, b))
        for bit in reversed(bits):
            (low, high), (a, b) = pieces[bit], pieces[bit + 1]
            partner = members[place ^ 1 << bit]
            c, d = (b, high) if a == low else (low, a)
            comm.exchange(Send(x[a:b], partner), Recv(x[c:d], partner))

    return folded(comm, x, core_part)


def recursively(comm, x):
    """Halving and doubling as one recursion: the way back is what follows the call."""
    def halve(members, low, high):
        if len(members) == 1:
            return
        middle, count = (low + high + 1) // 2, len(members) // 2
        place = members.index(comm.rank)
        lower = place < count
        partner = members[place + count if lower else place - count]
        keep, give = ((low, middle), (middle, high))[:: 1 if lower else -1]
        mine, yours = x[slice(*keep)], x[slice(*give)]
        inbox = torch.empty_like(mine)
        comm.sendrecv(yours, partner, inbox, partner)
        comm.accumulate_(mine, inbox)
        del inbox
        halve(members[:count] if lower else members[count:], *keep)
        comm.sendrecv(mine, partner, yours, partner)

    return folded(comm, x, lambda comm, x, members: halve(members, 0, len(x)))


def by_hand(comm, x, group):  # right, without any collective
    first = comm.rank - comm.rank % group
    place, count = comm.rank - first, comm.size // group
    pieces = x.tensor_split(group)
    right, left = first + (place + 1) % group, first + (place - 1) % group
    for step in range(group - 1):
        arriving = pieces[(place - step - 1) % group]
        inbox = torch.empty_like(arriving)
        comm.sendrecv(pieces[(place - step) % group], right, inbox, left)
        arriving += inbox
    mine = pieces[(place + 1) % group]  # complete in this group; now across, piece by piece
    parts = mine.tensor_split(count)
    me = comm.rank // group
    up, down = (comm.rank + group) % comm.size, (comm.rank - group) % comm.size
    for step in range(count - 1):
        arriving = parts[(me - step - 1) % count]
        inbox = torch.empty_like(arriving)
        comm.sendrecv(parts[(me - step) % count], up, inbox, down)
        arriving += inbox
    for step in range(count - 1):
        comm.sendrecv(parts[(me + 1 - step) % count], up, parts[(me - step) % count], down)
    for step in range(group - 1):
        comm.sendrecv(pieces[(place + 1 - step) % group], right, pieces[(place - step) % group],
                      left)
    return x


def teams(comm, group):
    team = comm.split(comm.rank // group)
    return team, comm.split(0 if team.rank == 0 else None)


def leaders_by_hand(comm, x, group):  # right as well: the leader gathers pieces
    team, leaders = teams(comm, group)
    padded = torch.zeros(-(-len(x) // group) * group, dtype=x.dtype)
    padded[: len(x)] = x
    piece = reduce_scatter(team, padded.view(group, -1))
    if team.rank:
        team.send(piece, 0)
        team.recv(piece, 0)
    else:
        pieces = [piece, *(torch.empty_like(piece) for _ in range(group - 1))]
        for other in range(1, group):
            team.recv(pieces[other], other)
        whole = torch.cat(pieces)
        all_reduce(leaders, whole, algorithm="ring")
        for other in range(1, group):
            team.send(whole.view(group, -1)[other].contiguous(), other)
        piece = whole.view(group, -1)[0].contiguous()
    x.copy_(all_gather(team, piece).view(-1)[: len(x)])
    return x


def wires(ring):
    return [(min(a, b), max(a, b)) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]


def without(links, ring):
    left = dict(links)
    for pair in wires(ring):
        left[pair] -= 1
    return {pair: count for pair, count in left.items() if count > 0}


def with_networkx(ranks, links):  # right, in another style: fewest ways first, links in a graph
    def rings(graph, path):
        if len(path) == ranks:
            if graph.has_edge(path[-1], path[0]):
                yield path
            return
        for b in sorted(set(graph[path[-1]]) - set(path), key=graph.degree):
            yield from rings(graph, [*path, b])

    def graph_of(links):
        graph = nx.Graph(list(links))
        graph.add_nodes_from(range(ranks))
        return graph

    for first in rings(graph_of(links), [0]):
        for second in rings(graph_of(without(links, first)), [0]):
            return first, second
    return None


def small_steps(sizes, routes, capacity):  # right as well: all rates grow together, in NumPy
    links = sorted(capacity)
    uses = np.array([[link in route for link in links] for route in routes], float)
    room = np.array([capacity[link] for link in links])
    left, ends, now = np.array(sizes, float), np.zeros(len(sizes)), 0.0
    while (left > 1e-6).any():
        rates, growing = np.zeros(len(sizes)), left > 1e-6
        while growing.any():
            crowd = growing @ uses
            with np.errstate(divide="ignore", invalid="ignore"):
                more = np.where(crowd > 0, (room - rates @ uses) / crowd, np.inf)
            rates[growing] += more.min()
            growing &= ~(uses @ (more <= more.min() * (1 + 1e-9)) > 0)
        step = (left[rates > 0] / rates[rates > 0]).min()
        now += step
        ends[left > 1e-6] = now
        left = left - step * rates
    return ends


def sorted_by_key(rack_of, free, ranks):  # right as well
    room = {rack: sum(rack_of[host] == rack for host in free) for rack in set(rack_of)}
    return sorted(free, key=lambda host: (-room[rack_of[host]], rack_of[host]))[:ranks]


def end_to_end(comm, weights, grads, servers, lr):  # right: all keys as one vector, in objects
    keys = sorted(weights)
    flat = torch.cat([(grads or weights)[key] for key in keys]).tensor_split(servers)
    if comm.rank >= servers:
        first = comm.rank % servers  # whom to begin with: each worker another
        order = [(first + i) % servers for i in range(servers)]
        works = [comm.isend(flat[s], s) for s in order]
        for work in works:
            work.wait()
        answers = [torch.empty_like(piece) for piece in flat]
        works = [comm.irecv(answers[s], s) for s in order]
        for work in works:
            work.wait()
        for key, new in zip(keys, torch.cat(answers).split([len(weights[k]) for k in keys]),
                            strict=True):
            weights[key].copy_(new)
        return weights
    workers = range(servers, comm.size)
    mine = flat[comm.rank].clone()
    inboxes = [torch.empty_like(mine) for _ in workers]
    comm.exchange(*(Recv(inbox, w) for inbox, w in zip(inboxes, workers, strict=True)))
    mine -= lr * torch.stack(inboxes).mean(0)
    comm.exchange(*(Send(mine, w) for w in workers))
    return weights


def by_collectives(comm, machines, weights, grad, lr):  # right: not one message of its own
    number = next((i for i, machine in enumerate(machines) if comm.rank in machine), None)
    inside = comm.split(number, 0 if number is None else machines[number].index(comm.rank))
    x = torch.zeros_like(weights) if grad is None else grad.clone()
    if inside:
        reduce(inside, x, algorithm="flat")
    top = comm.split(0 if inside is None or inside.rank == 0 else None)
    if top:
        reduce(top, x, algorithm="flat")
        if grad is None:
            weights.sub_(x, alpha=lr / sum(map(len, machines)))
        broadcast(top, weights, algorithm="flat")
    if inside:
        broadcast(inside, weights, algorithm="flat")
    return weights


def counts_who_is_behind(request, clock, clocks, staleness):  # right as well
    if request == "push":
        return True
    return not [other for other in clocks if other < clock - staleness]


def in_numpy(request, clock, clocks, staleness):  # right as well
    return int(request != "pull" or np.min(clocks) + staleness >= clock)


def with_other_words(request, worker, w, g, backups, lr, lam):  # right as well
    if request == "pull":
        backups[worker] = w.detach().clone()
        return w.clone()
    correction = g.pow(2).mul(w - backups[worker])
    w.sub_(g.mul(lr)).sub_(correction, alpha=lr * lam)
    return None


def rank_by_rank(comm, g, memory, k):
    """Adds one rank's values after the other."""
    memory += g
    places = memory.abs().topk(min(k, len(g))).indices
    values, total = memory[places], torch.zeros_like(g)
    memory[places] = 0
    for where, what in zip(all_gather(comm, places), all_gather(comm, values), strict=True):
        total[where] += what
    return total / comm.size


def around(node):
    """The nodes before and after this one, or None."""
    place = node["chain"].index(node["me"])
    ends = [None, *node["chain"], None]
    return ends[place], ends[place + 2]


def by_places(node, message):  # right as well: a log, positions, one cumulative acknowledgement
    log, last = node.setdefault("log", []), node.setdefault("numbers", set())
    node.setdefault("stable", 0)
    if message[0] == "read":
        return [("client", ("value", message[1], node["values"].get(message[2], 0)))]
    if message[0] == "chain":
        node["chain"] = message[1]
        _, after = around(node)
        if after is not None:
            return [(after, ("op", place, log[place]))
                    for place in range(node["stable"], len(log))]
        pending = range(node["stable"], len(log))
        node["stable"] = len(log)
        before, _ = around(node)
        return [("client", ("done", log[place][1])) for place in pending] + (
            [] if before is None else [(before, ("upto", len(log)))])
    if message[0] == "upto":
        node["stable"] = max(node["stable"], message[1])
        before, _ = around(node)
        return [] if before is None else [(before, message)]
    _, request = (None, message) if message[0] == "add" else message[1:]
    before, after = around(node)
    if request[1] not in last:
        last.add(request[1])
        log.append(request)
        node["values"][request[2]] = node["values"].get(request[2], 0) + request[3]
    if after is not None:
        return [(after, ("op", len(log) - 1, request))]
    node["stable"] = len(log)
    return [("client", ("done", request[1]))] + (
        [] if before is None else [(before, ("upto", len(log)))])


def momentum_in_numpy(comm, weights, grad, state, lr, mu):  # right as well
    def rows(x):
        return torch.cat([x, x.new_zeros(-len(x) % comm.size)]).view(comm.size, -1)

    mean = reduce_scatter(comm, rows(grad), "avg").numpy()
    state["v"] = mu * state.get("v", np.zeros_like(mean)) + mean
    v = torch.from_numpy(state["v"].astype(mean.dtype))
    return weights.copy_(all_gather(comm, rows(weights)[comm.rank] - lr * v).flatten()
                         [: len(weights)])


def with_prefetch(comm, layers, shards, x):
    """Right: the next layer is gathered while this one computes."""
    def run(order, use):
        coming = comm.begin(all_gather, shards[order[0]])
        for i, following in zip(order, [*order[1:], None], strict=True):
            w = coming.wait().flatten()[: layers[i].numel]
            coming = None if following is None else comm.begin(all_gather, shards[following])
            use(i, w)
            del w

    inputs, mine, order = [x], [None] * len(layers), list(range(len(layers)))
    run(order, lambda i, w: inputs.append(layers[i].forward(w, inputs[-1])))
    grad = [inputs.pop()]

    def back(i, w):
        grad[0], g = layers[i].backward(w, inputs.pop(), grad[0])
        padded = torch.cat([g, g.new_zeros(-len(g) % comm.size)])
        mine[i] = reduce_scatter(comm, padded.view(comm.size, -1), op="avg")

    run(order[::-1], back)
    return mine


def saves_a_tuple(job, disk):  # right as well: it counts all steps from the first, and skips some
    saved = disk.get("all")
    if saved is not None:
        job.model.load_state_dict(saved[0])
        job.optimizer.load_state_dict(saved[1])
        job.scheduler.load_state_dict(saved[2])
        torch.random.set_rng_state(saved[3])
    done = saved[4] if saved else 0
    taken, epoch = 0, 0
    while taken < job.steps:
        random = torch.Generator()
        random.manual_seed(job.seed + epoch)
        for batch in torch.randperm(job.samples, generator=random).split(job.batch):
            if done <= taken < job.steps:
                job.step(batch)
                if (taken + 1) % job.every == 0:
                    disk["all"] = (job.model.state_dict(), job.optimizer.state_dict(),
                                   job.scheduler.state_dict(), torch.random.get_rng_state(),
                                   taken + 1)
            taken += 1
        epoch += 1


def two_slots(disk):  # right as well: no rename, the older of two files is written over
    def whole(name):
        if name not in disk.names():
            return None
        text = disk.read(name)
        return pickle.loads(text[4:]) if text[:4] == zlib.crc32(text[4:]).to_bytes(4) else None

    def save(state):
        text = pickle.dumps({"step": state["step"], "weights": state["weights"].clone()})
        name = "ab"[state["step"] % 2]
        yield
        disk.write(name, zlib.crc32(text).to_bytes(4) + text)
        disk.sync(name)

    def load():
        found = [state for state in map(whole, "ab") if state]
        return max(found, key=lambda state: state["step"], default=None)

    return save, load


def by_halving(goal, nodes, node_mttf_h, save_s, restart_s):
    """Looks for the root of the derivative, which it takes by differences."""
    mttf_s = 3600 / (nodes / node_mttf_h)

    def cost(c):
        if goal.startswith("least"):
            return save_s / c + c / 2 / mttf_s
        return -(1 - save_s / c) / (mttf_s + restart_s + c / 2) * mttf_s

    low, high = save_s / 2, 100 * (mttf_s + restart_s + save_s)
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        if cost(middle * (1 + 1e-5)) < cost(middle * (1 - 1e-5)):
            low = middle
        else:
            high = middle
    return mttf_s, low, abs(cost(low))


def asks_only_the_living(comm, deaths, limit_s):
    """Each round ends a limit after its beginning on this rank; whoever is silent is left out."""
    peers, known = set(range(comm.size)) - {comm.rank}, {comm.rank}
    for _ in range(deaths + 1):
        until_s, heard = comm.now() + limit_s, {}
        sends = [comm.isend(tuple(known), peer) for peer in peers]
        inboxes = {peer: [] for peer in peers}
        receives = {comm.irecv(inboxes[peer], peer): peer for peer in peers}
        open_ = [*sends, *receives]
        while open_:
            done = comm.wait_any(open_, max(until_s - comm.now(), 0))
            if done is None:
                break
            open_.remove(done)
            if done in receives:
                heard[receives[done]] = inboxes[receives[done]][0]
        for work in open_:
            work.cancel()
        peers = set(heard)
        known = known.union(*heard.values())
    return sorted(known)


RIGHT = {
    "fix-deadlock": [takes_turns], "shift": [posts_both], "finish-times": [small_steps],
    "place-job": [sorted_by_key], "binomial-broadcast": [lowest_bit_tree, posts_and_waits],
    "pipelined-chain": [one_ahead], "best-segments": [best_by_search],
    "bruck-all-to-all": [with_a_dictionary],
    "halving-doubling": [by_bits_and_nearest_first, recursively],
    "hierarchical": [by_hand, leaders_by_hand], "find-rings": [with_networkx],
    "sharded-store": [end_to_end], "two-level-step": [by_collectives],
    "ssp-rule": [counts_who_is_behind, in_numpy], "dc-asgd": [with_other_words],
    "top-k": [rank_by_rank], "chain-replication": [by_places], "zero-stage-3": [with_prefetch],
    "zero-stage-1": [momentum_in_numpy],
    "restart-bits": [saves_a_tuple], "surviving-checkpoint": [two_slots],
    "best-interval": [by_halving], "shrink": [asks_only_the_living],
}
