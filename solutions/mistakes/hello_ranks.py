from dtlab.grading.mistakes import Mistake

RETURN = "comm.rank, comm.size, left, right"
CIRCLE = ("The ranks stand in a circle: beyond the last comes rank 0, before rank 0 comes the last. "
          "The remainder does that: (rank + 1) % size, (rank - 1) % size.")

HINTS = {
    "who am I": "comm.rank is this rank's number, comm.size how many there are.",
    "neighbours": "The ranks stand in a circle: beyond the last comes rank 0, before rank 0 comes "
        "the last. The remainder does that: (rank + 1) % size, (rank - 1) % size.",
    "alone": "A rank that is alone is its own neighbour on both sides.",
}

MISTAKES = [
    Mistake({RETURN: "comm.size, comm.rank, left, right"},
            "Rank and size are the wrong way round: return rank, size, left, right."),
    Mistake({RETURN: "comm.rank, 4, left, right"},
            "Ask the communicator how many ranks there are (comm.size); it isn't always 4."),
    Mistake({"comm.size": "4"},
            "Ask the communicator how many ranks there are (comm.size); it isn't always 4."),
    Mistake({RETURN: "comm.rank + 1, comm.size, left, right"},
            "Ranks are counted from 0: comm.rank is this rank's number, as it is."),
    Mistake({RETURN: "comm.rank, comm.size, right, left"},
            "Left and right are the wrong way round: right is the next higher rank."),
    Mistake({"(comm.rank - 1) % comm.size": "comm.rank - 1", "(comm.rank + 1) % comm.size": "comm.rank + 1"},
            HINTS["neighbours"]),
    Mistake({"(comm.rank - 1) % comm.size": "comm.rank - 1"}, HINTS["neighbours"]),
    Mistake({"(comm.rank + 1) % comm.size": "comm.rank + 1"}, HINTS["neighbours"]),
    Mistake({"(comm.rank - 1) % comm.size": "max(comm.rank - 1, 0)", "(comm.rank + 1) % comm.size": "min(comm.rank + 1, comm.size - 1)"},
            HINTS["neighbours"]),
    Mistake({RETURN: "comm.rank, comm.size, right"},
            "Return the four numbers as one tuple: return rank, size, left, right."),
]
