from dtlab.grading.mistakes import Mistake

MOVE, RETURN = "comm.sendrecv(value, right, inbox, left)", "return inbox[0]"
PASSED_ON = ("Each rank sends its own value to its right, not what it has received, and returns "
             "what comes from its left.")

HINTS = {
    "odd circles": "In an odd circle two neighbours have the same parity: try your order of sends "
        "and receives on paper for 3 ranks.",
    "alone": "A rank can't send to itself: if comm.size is 1, there is nothing to send, and its "
        "left neighbour's value is its own.",
}

MISTAKES = [
    Mistake({RETURN: "return value"},
            "Each rank returned its own value: return what came from the left neighbour."),
    Mistake({MOVE: "comm.sendrecv(value, left, inbox, right)"}, "The values went round the wrong "
            "way: send to rank + 1, receive from rank − 1."),
    Mistake({MOVE: "comm.sendrecv(value, comm.rank ^ 1, inbox, comm.rank ^ 1)"}, "Ranks swap in "
            "pairs, 0 with 1, 2 with 3: in a circle each sends to its right, and receives from its "
            "left."),
    Mistake({MOVE: """if comm.rank % 2 == 0:
        comm.send(value, right)
        comm.recv(inbox, left)
    else:
        comm.recv(inbox, left)
        value = inbox[0]
        comm.send(value, right)"""}, PASSED_ON),
    Mistake({MOVE: """if comm.rank:
        comm.recv(inbox, left)
        value = inbox[0]
    comm.send(value, right)
    if comm.rank == 0:
        comm.recv(inbox, left)"""}, PASSED_ON),
    Mistake({"    if comm.size == 1:\n        return value\n": ""}, HINTS["alone"]),
]
