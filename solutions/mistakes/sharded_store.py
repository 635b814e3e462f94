from dtlab.grading.mistakes import Mistake

PART = "[tensors[key].tensor_split(servers)[server] for key in sorted(weights)]"
STEP, MEAN = "w.sub_(g, alpha=lr / len(workers))", "lr / len(workers)"
CUT = ("Cut every key into one part per server (w.tensor_split(servers)), or lay all keys end to end "
       "and cut that; no hash can cut a huge key.")
GRADS, ANSWER = "for g in part(grads, s)))", "for w in part(weights, s)))"

HINTS = {
    "weights": "What a server adds up must be the same part of the same key, from every worker: "
        "do both ends agree which server holds it, and where the cuts are?",
    "any servers": "It works for some numbers of servers and workers only: the ranks below "
        "`servers` serve, all the others work.",
    "uneven keys": "It fails where a key does not divide evenly, or is smaller than the number of "
        "servers: w.tensor_split(servers) cuts any size, into parts that may be empty.",
    "any order": "It fails where ranks list their keys in different orders: agree on one order, "
        "sorted(weights).",
    "balance": "A server gets more than its share. Cut every key into one part per server "
        "(w.tensor_split(servers)), or lay all keys end to end and cut that; no hash can cut a "
        "huge key.",
    "traffic": "A worker sends each server its part only, and gets that part from it.",
    "time": "Ports are idle. If every worker sends to server 0 first, the other servers wait: "
        "post all sends and receives together (comm.exchange), or let worker w begin with server "
        "w % servers.",
}

MISTAKES = [
    Mistake({"def part(": "weights = {key: w.clone() for key, w in weights.items()}\n\n    def part("},
            "The weights are as they were on every worker: write the new ones into the tensors that "
            "were given (w.sub_(…), w.copy_(…)), don't make new ones."),
    Mistake({MEAN: "lr"}, "The step is taken with the sum of the gradients: divide by the number of "
            "workers, servers not counted."),
    Mistake({MEAN: "lr / servers"}, "The sum is divided by the number of servers: divide it by the "
            "number of workers."),
    Mistake({MEAN: "lr / comm.size"}, "The sum is divided by the number of all ranks: divide it by "
            "the number of workers; servers have no gradient."),
    Mistake({MEAN: "1 / len(workers)"},
            "The learning rate is missing: the new weights are weights − lr · mean."),
    Mistake({"w.sub_(": "w.add_("}, "That goes uphill: the new weights are weights − lr · mean."),
    Mistake({STEP: "w.zero_() if gradients is pushed[workers[0]] else None; w.add_(g, alpha=1 / "
             "len(workers))"}, "The workers end with gradients, not with weights: the new weights "
            "are weights − lr · mean."),
    Mistake({"        comm.exchange(*(Recv(w, s) for s in range(servers) " + ANSWER:
             "        [weights[k].sub_(grads[k], alpha=lr) for k in weights]\n        comm.exchange(*("
             "Recv(w.clone(), s) for s in range(servers) " + ANSWER}, "Each worker steps with its "
            "own gradient only: what comes from the servers is not in its weights."),
    Mistake({"Send(w, worker) for worker in workers": "Send(w, worker) for worker in workers[:1]",
             "    if comm.rank in workers:": "    if comm.rank in workers[1:]:\n        comm.exchange"
             "(*(Send(g, s) for s in range(servers) " + GRADS + "\n    elif comm.rank in workers:"},
            "One worker has the new weights: send them to all the others, too."),
    Mistake({"for key in sorted(weights)]": "for key in weights]"}, HINTS["any order"]),
    Mistake({PART: "[tensors[key].view(servers, -1)[server] for key in sorted(weights)]"},
            HINTS["uneven keys"]),
    Mistake({PART: "[tensors[key][server * (len(tensors[key]) // servers) : (server + 1) * "
             "(len(tensors[key]) // servers)] for key in sorted(weights)]"}, "The last elements of a "
            "key that does not divide evenly never change: w.tensor_split(servers) cuts any size."),
    Mistake({"[torch.empty_like(w) for w in mine]": "[torch.empty(len(w)) for w in mine]"}, "It "
            "works for float32 only: make room with torch.empty_like, or dtype=w.dtype."),
    Mistake({PART: "[tensors[key] for i, key in enumerate(sorted(weights)) if i % servers == server]"},
            f"Whole keys go to one server each, whatever their size. {CUT}"),
    Mistake({PART: "[tensors[key] for key in sorted(weights) if server == 0]"}, "Server 0 gets "
            f"everything, and the others nothing: that is one server. {CUT}"),
    Mistake({GRADS: "for g in [grads[k] for k in sorted(grads)]))", "[torch.empty_like(w) for w in "
             "mine] for": "[torch.empty_like(weights[k]) for k in sorted(weights)] for",
             "zip(mine, gradients": "zip(mine, [g.tensor_split(servers)[comm.rank] for g in "
             "gradients]"}, "Every server gets more than its share: send each one only its own "
            "part."),
    Mistake({"comm.exchange(*(Send(g, s) for s in range(servers) " + GRADS: "[comm.send(g, s) for s " "in range(servers) " + GRADS[:-2] + "]", "comm.exchange(*(Recv(g, worker) for worker in " "workers for g in pushed[worker]))": "[comm.recv(g, worker) for worker in workers for g " "in pushed[worker]]"},
            HINTS["time"]),
    Mistake({MEAN: "lr / (comm.size - 1)"}, "The sum is divided by the number of all ranks but one: "
            "there are `servers` servers, so divide by comm.size - servers."),
    Mistake({PART: "[tensors[key] for key in sorted(weights) if __import__('zlib').crc32(key.encode())"
             " % servers == server]"}, f"A hash places whole keys, whatever their size. {CUT}"),
    Mistake({"        comm.exchange(*(Recv(g, worker) for worker in workers for g in pushed[worker]))\n":
             "        for worker in workers:\n            comm.exchange(*(Recv(g, worker) for g in "
             "pushed[worker]))\n"}, "Each server receives from one worker after the other, while "
            "other servers wait for the same worker: post all receives together (comm.exchange)."),
    Mistake({"        for gradients in pushed.values():\n": "        for worker, gradients in "
             "pushed.items():\n            comm.exchange(*(Recv(g, worker) for g in gradients))\n",
             "        comm.exchange(*(Recv(g, worker) for worker in workers for g in pushed[worker]))"
             "\n": "", "        comm.exchange(*(Send(w, worker) for worker in workers for w in mine))":
             "            comm.exchange(*(Send(w, worker) for w in mine))"}, "A server answers each "
            "worker when its gradient has come, so only the last one sees all: add up all "
            "gradients first, then answer."),
]
