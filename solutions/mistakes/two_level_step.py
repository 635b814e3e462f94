from dtlab.grading.mistakes import Mistake

COUNT, TOTAL = "lr / sum(map(len, machines))", "comm.send(total, server)  # 4"
HAND_OUT = "        comm.exchange(*(Send(weights, neighbour) for neighbour in neighbours))  # 7\n"
PULL = "        comm.recv(weights, aggregator)  # 7\n"
ANSWER = "Send(weights, aggregator) for aggregator in aggregators"

HINTS = {
    "weights": "The new weights are weights − lr · (sum of all workers' gradients) / (number of "
        "workers): is each gradient in the sum, once, and is the sum divided once? Which ranks are "
        "in a machine is what `machines` says.",
    "uneven machines": "It works only where all machines hold equally many workers. The mean of "
        "the machines' means is not the mean: send sums, divide by the number of all workers.",
    "any layout": "A machine's ranks need not follow each other, a machine may hold one worker, "
        "the vector may be empty: look it up in `machines`.",
    "any dtype": "It works for float32 only: make room with torch.empty_like(weights).",
    "between machines": "More than one vector goes to the server, or comes from it, for each "
        "machine; or machines send to each other past the server. An aggregator talks to the "
        "ranks of its own machine, and to the server.",
}

MISTAKES = [
    Mistake({"    server, aggregators =": "    weights = weights.clone()\n    server, aggregators ="},
            "The weights are as they were on every worker: write the new ones into the tensors that "
            "were given (w.sub_(…), w.copy_(…)), don't make new ones."),
    Mistake({COUNT: "lr"}, "The step is taken with the sum of the gradients: divide by the number of "
            "workers, servers not counted."),
    Mistake({COUNT: "lr / comm.size"}, "The sum is divided by the number of all ranks: divide it by "
            "the number of workers; servers have no gradient."),
    Mistake({COUNT: "lr / len(machines)"}, "The sum is divided by the number of machines: divide it "
            "by the number of all workers."),
    Mistake({COUNT: "1 / sum(map(len, machines))"},
            "The learning rate is missing: the new weights are weights − lr · mean."),
    Mistake({"weights.sub_(total": "weights.add_(total"},
            "That goes uphill: the new weights are weights − lr · mean."),
    Mistake({TOTAL: "comm.send(total / (1 + len(neighbours)), server)", COUNT: "lr / len(machines)"},
            "That is the mean of the machines' means, in which a worker of a small machine counts "
            "for more. Send sums, and divide by the number of all workers at the end."),
    Mistake({TOTAL: "comm.send(total / (1 + len(neighbours)), server)"}, "The sum is divided twice, in "
            "the machine and at the server: send sums, and divide by the number of all workers at "
            "the end."),
    Mistake({ANSWER: "Send(total / sum(map(len, machines)), aggregator) for aggregator in aggregators"},
            "The workers end with the mean gradient: the server must send the new weights, "
            "weights − lr · mean."),
    Mistake({HAND_OUT: "", PULL: ""}, "Only the aggregators have the new weights: each must send "
            "them to the ranks of its machine, which receive them into the `weights` they were given."),
    Mistake({"        " + TOTAL: "        weights.sub_(total, alpha=lr / (1 + len(neighbours)))\n"
             "        comm.send(total, server)", "comm.recv(weights, server)  # 6":
             "comm.recv(total, server)"}, "The machines were never averaged: each aggregator must "
            "push the sum to the server, and pull the new weights."),
    Mistake({"add_up(total, neighbours)  # 2, 3": "add_up(grad.clone(), neighbours)"}, "The "
            "gradients of the aggregators only are added up: each adds those of its machine first."),
    Mistake({"total = grad.clone()": "total = torch.zeros_like(grad)"}, "The aggregators' own "
            "gradients are missing: begin the sum with them."),
    Mistake({"    server, aggregators =": "    machines = [[worker] for machine in machines for "
             "worker in machine]\n    server, aggregators ="}, "Every worker's gradient crosses the "
            "network. Let the first rank of each machine add up their gradients, and send that one "
            "sum."),
    Mistake({ANSWER: "Send(weights, worker) for machine in machines for worker in machine",
             HAND_OUT: "", PULL: "        comm.recv(weights, server)\n"}, "The sums come up as they "
            "should, but the server answers every worker. Answer the aggregators; they send them on "
            "inside their machines."),
    Mistake({"    server, aggregators =": "    numbers = iter(range(1, comm.size))\n    machines = "
             "[[next(numbers) for _ in machine] for machine in machines]\n    server, aggregators ="},
            "Bytes go from machine to machine past the server: a machine's ranks need not follow "
            "each other, look them up in `machines`."),
    Mistake({"inbox = torch.empty_like(weights)": "inbox = torch.empty(len(weights))"},
            HINTS["any dtype"]),
    Mistake("""
def two_level_step(comm, machines, weights, grad, lr):
    from dtlab.collectives import broadcast, reduce
    number = next((i for i, machine in enumerate(machines) if comm.rank in machine), None)
    first = comm.rank in [0, *(machine[0] for machine in machines)]
    team, leaders = comm.split(number), comm.split(0 if first else None)
    total = torch.zeros_like(weights) if grad is None else grad.clone()
    if team:
        reduce(team, total, root=0)
    if leaders:
        reduce(leaders, total, root=0)
        weights.sub_(total, alpha=lr / sum(map(len, machines)))
        broadcast(leaders, weights, root=0)
    if team:
        broadcast(team, weights, root=0)
""", "comm.split numbers the ranks of a machine in ascending order, so its rank 0 is the least, not "
            "machine[0]: comm.split(colour, key) takes another order, or let the least aggregate."),
]
