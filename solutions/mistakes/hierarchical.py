from dtlab.grading.mistakes import Mistake

TEAM, LEADERS = "comm.split(comm.rank // group)", "comm.split(0 if team.rank == 0 else None)"
REDUCE = 'reduce(team, x, root=0, algorithm="rabenseifner")'
ACROSS = 'all_reduce(leaders, x, algorithm="ring")'
BROADCAST = 'broadcast(team, x, root=0, algorithm="scatter_allgather")'
IF = "    if leaders is not None:\n"
EQUALLY = "In a ring of leaders, all send equally much."

HINTS = {
    "sums": "Sum up inside each group, at its first rank; all-reduce among these leaders; "
        "broadcast inside each group.",
    "any groups": "It works for some groups only: a group may have one rank, and there may be one "
        "group only. A rank that is alone has no rank to send to.",
    "any n": "It fails where the group does not divide n: x.tensor_split(k) cuts any n.",
    "any dtype": "It works for float32 only: make room with torch.empty_like(x), or dtype=x.dtype.",
    "slow links": "More crosses the spine than a ring of leaders needs. Rank r belongs to group r "
        "// group, of `group` ranks; only the groups' leaders all-reduce across the spine, by a "
        "ring (not a tree, nor recursive doubling), in which all send equally much.",
    "time": "Inside the groups too much travels one after the other: whole vectors through the "
        "leader's port, or one part after the other while most ranks wait. For long vectors: reduce-scatter the group, then gather the parts at the "
        "leader (collectives.reduce(…, algorithm='rabenseifner')); and back: scatter, all-gather "
        "(algorithm='scatter_allgather').",
    "rounds": "Groups must work at the same time: 2(k−1) rounds to the leaders, 2(p/k−1) among "
        "them, 2(k−1) back.",
}

MISTAKES = [
    Mistake({BROADCAST: "pass"}, "Only the leaders hold the sum: broadcast it inside each group."),
    Mistake({IF + "        " + ACROSS: ""}, "Each rank holds the sum of its own group only: the "
            "leaders must all-reduce among them."),
    Mistake({REDUCE: "pass"}, "The sums are those of the leaders' vectors only: reduce inside each "
            "group first, to its first rank."),
    Mistake({ACROSS: 'all_reduce(comm.split(0), x, algorithm="ring")'}, "Some ranks wait in "
            "comm.split, which all ranks of comm must call: those that shall be in no group give "
            "the colour None."),
    Mistake({LEADERS: "comm if team.rank == 0 else None"}, "Some ranks wait for others that never "
            "come: the leaders need a communicator of their own, comm.split(0 if leader else None)."),
    Mistake({LEADERS: "comm"}, "All ranks all-reduce across the groups, where only the leaders' "
            "sums are added up: in comm.split, give the colour None for every rank but the "
            "leaders."),
    Mistake({IF: "    if True:\n"}, "comm.split returns None to a rank whose colour is None: only "
            "the leaders may use the communicator of the leaders (`if leaders is not None: …`)."),
    Mistake({REDUCE: 'own = x.clone()\n    ' + REDUCE, BROADCAST: "x.copy_(x if leaders is not None "
             "else own)\n    total = x.clone()\n    broadcast(team, total, root=0, "
             "algorithm=\"scatter_allgather\")\n    x.add_(total) if team.rank else None"},
            "Some sums are too large: in the end overwrite x by the sum, don't add it."),
    Mistake({TEAM: "comm.split(comm.rank % (comm.size // group))"}, "The first messages go from "
            "group to group already. First sum up inside each group, the `group` ranks that stand "
            "side by side: rank r belongs to group r // group."),
    Mistake({LEADERS: "comm.split(0 if team.rank == 0 else 1)"}, "The leaders all-reduce, and so do "
            "other ranks: in comm.split, give the colour None for every rank but the leaders; those "
            "get None back, and skip this step."),
    Mistake({TEAM: "comm", LEADERS: "None"}, "As many bytes cross the slow links as a single "
            "reduction over all ranks puts there: first sum up inside each group, so that only p/k "
            "sums take part in the ring between racks."),
    Mistake({REDUCE: 'all_reduce(comm, x, algorithm="ring")', IF + "        " + ACROSS: "",
             BROADCAST: "pass"}, "That is what one ring over all ranks puts there, 2(p−1)/p·n: "
            "first sum up inside each group, so that only p/k sums take part in the ring between "
            "racks."),
    Mistake({REDUCE: 'all_reduce(team, x, algorithm="ring")', LEADERS: "comm.split(team.rank)",
             BROADCAST: "pass"}, "Every rank of a group sends its whole vector through the spine: "
            "that is k times too much. Let one leader do it, or give each rank a k-th part."),
    Mistake({ACROSS: 'all_reduce(leaders, x, algorithm="tree")'}, "One rack's way to the spine "
            "carries more than the others': it is the root of a tree. " + EQUALLY),
    Mistake({ACROSS: 'all_reduce(leaders, x, algorithm="recursive_doubling")'}, "The leaders send "
            "their whole vectors in every round. " + EQUALLY),
    Mistake({ACROSS: 'all_reduce(leaders, x, algorithm="flat")'}, "A single leader collects from "
            "all others, and answers them. " + EQUALLY),
    Mistake({REDUCE: 'reduce(team, x, root=0, algorithm="binomial")', BROADCAST:
             'broadcast(team, x, root=0, algorithm="binomial")'}, "Inside the groups whole vectors "
            "travel one after the other, so the leader's port is the bottleneck. For long vectors: "
            "reduce(…, algorithm='rabenseifner'), and broadcast(…, algorithm='scatter_allgather')."),
    Mistake({"    team =": "    whole, x = x, x[: len(x) // group * group]\n    team ="}, "The last "
            "elements are left out, where the group does not divide n: x.tensor_split(k) cuts any "
            "n."),
    Mistake({"root=0": "root=comm.rank // group * group"}, "In a communicator that comm.split "
            "returns, ranks are numbered anew, from 0: the first rank of every group is 0 there, "
            "and so is the root."),
    Mistake({BROADCAST: 'pass\n    all_reduce(comm, x, algorithm="hierarchical", group=group)'}, "The "
            "answer calls the library's own algorithm=hierarchical, which does just what the "
            "exercise asks for: build it out of others."),
    Mistake({LEADERS: "comm.split(0 if comm.rank < comm.size // group else None)"}, "The leaders are "
            "not the first ranks of all: each group has one, the rank whose team.rank is 0."),
    Mistake({BROADCAST: 'broadcast(comm, x, root=0, algorithm="scatter_allgather")'}, "Rank 0 "
            "broadcasts to all ranks, across the spine: every leader has the sum already, and "
            "broadcasts in its group only."),
]
