from dtlab.grading.mistakes import Mistake

ADD = "comm.accumulate_(arriving, summand)"
MOVE_1 = "comm.sendrecv(leaving, right, summand, left)"
MOVE_2 = "comm.sendrecv(leaving, right, arriving, left)"
FIRST = "chunks[(me - step) % p], chunks[(me - step - 1) % p]"
SECOND = "chunks[(me + 1 - step) % p], chunks[(me - step) % p]"
FIRST_PHASE = ("In step s of the first phase rank r sends chunk r − s, and adds what comes, once it "
               "has come, to chunk r − s − 1.")
SECOND_PHASE = ("which chunk do you send in step s of the all-gather? Begin with the one that is "
                "complete here, chunk r + 1, then pass on what came in the step before.")

HINTS = {
    "sums": FIRST_PHASE + " p − 1 steps later each rank has one complete chunk; p − 1 more hand "
        "them round.",
    "any p": "It works for some numbers of ranks only: a ring needs no power of two.",
    "any n": "It fails where p does not divide n. x.tensor_split(p) cuts any n: sizes differ by "
        "one element at most, and may be 0; cut your inbox to the size of what comes.",
    "any dtype": "It works for float32 only: make room with torch.empty_like(x), or dtype=x.dtype.",
    "bytes": "A ring sends one chunk of n/p a step, in 2(p − 1) steps.",
    "rounds": "Let every rank send to the right and receive from the left in the same step: "
        "comm.sendrecv(chunk, right, inbox, left); each of the two phases has p − 1.",
    "memory": "More than one chunk is held. One inbox is enough: make it once, before the loop; "
        "chunks of x can be sent, and in the second phase received into, as they are; a + b makes another.",
}

MISTAKES = [
    Mistake({ADD: "arriving.copy_(summand)"},
            "All ranks agree, but each chunk is what one rank had at the start. Either nothing is "
            "added in the first phase, or the second begins with another chunk than the complete "
            "one, r + 1. " + FIRST_PHASE),
    Mistake({MOVE_1: "summand = torch.zeros_like(arriving); moved = comm.isend(leaving, right), "
             "comm.irecv(summand, left)", ADD: ADD + "; [work.wait() for work in moved]"},
            "What comes is added before it has come: wait first. " + FIRST_PHASE),
    Mistake({FIRST: "chunks[(me - step + 1) % p], chunks[(me - step - 1) % p]"},
            "In the first phase the wrong chunk is sent. " + FIRST_PHASE),
    Mistake({FIRST: "chunks[(me + step) % p], chunks[(me + step - 1) % p]",
             SECOND: "chunks[(me + 1 + step) % p], chunks[(me + step) % p]"},
            "Both phases count up, r + s, while the chunks go to the right. " + FIRST_PHASE),
    Mistake({FIRST: "chunks[(me + step) % p], chunks[(me + step - 1) % p]"},
            "The first phase counts up, r + s, while the chunks go to the right. " + FIRST_PHASE),
    Mistake({SECOND: "chunks[(me + 1 + step) % p], chunks[(me + step) % p]"},
            "The second phase counts up: " + SECOND_PHASE),
    Mistake({"range(p - 1):\n        leaving, arriving = " + SECOND:
             "range(p - 2):\n        leaving, arriving = " + SECOND},
            "On every rank just one chunk is wrong. That is an off-by-one: the all-gather has "
            "p − 1 steps, too."),
    Mistake({"range(p - 1):\n        leaving, arriving = " + FIRST:
             "range(p - 2):\n        leaving, arriving = " + FIRST},
            "Each chunk lacks what one rank had: that is an off-by-one, the first phase has p − 1 "
            "steps."),
    Mistake({"range(p - 1):\n        leaving, arriving = " + SECOND:
             "range(0):\n        leaving, arriving = " + SECOND},
            "Each rank holds one complete chunk: the first phase is right. Now send the complete "
            "chunks round the ring (the all-gather phase)."),
    Mistake({"chunks = x.tensor_split(p)": "chunks = list(x.tensor_split(p))",
             MOVE_2: "comm.sendrecv(leaving, right, inbox := torch.empty_like(arriving), left); "
             "chunks[(me - step) % p] = inbox"},
            "Each rank holds one complete chunk, and the others were sent on, but what arrived is "
            "not in x: receive straight into the chunk of x, or copy it there "
            "(`chunks[b][:] = inbox`); `chunks[b] = inbox` only renames the inbox."),
    Mistake({"chunks = x.tensor_split(p)": "chunks = list(x.tensor_split(p))",
             ADD: "chunks[(me - step - 1) % p] = arriving + summand"},
            "Some chunks of x hold the sum, all others what they held at the start: the sums are "
            "in new tensors. `chunk = chunk + inbox` makes one, and leaves x as it was; "
            "`chunk.add_(inbox)` and `comm.accumulate_(chunk, inbox)` change x."),
    Mistake({SECOND: "chunks[(me + 1 - step) % p], chunks[(me - step) % p].clone()",
             MOVE_2: MOVE_2 + "; chunks[(me - step) % p].add_(arriving)"},
            "Some sums are too large: in the second phase, overwrite, don't add."),
    Mistake({"(me + 1) % p, (me - 1) % p": "(me - 1) % p, (me + 1) % p"},
            "Every rank sends to its left. In this order of chunks, rank r sends to its right, "
            "(r + 1) % p, and receives from its left, (r - 1) % p."),
    Mistake("""
def ring_all_reduce(comm, x):
    leaving, arriving = x.clone(), torch.empty_like(x)
    for _ in range(comm.size - 1):
        comm.sendrecv(leaving, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)
        x += arriving
        leaving, arriving = arriving, leaving
""", "The whole vector goes out in every step. Cut it into p chunks (x.tensor_split(p)) and send "
            "one chunk a step: 2(p−1) steps of n/p."),
    Mistake("""
def ring_all_reduce(comm, x):
    for other in range(1, comm.size):
        if comm.rank == 0:
            comm.recv(inbox := torch.empty_like(x), other)
            x += inbox
        elif comm.rank == other:
            comm.send(x, 0)
    for other in range(1, comm.size):
        if comm.rank == 0:
            comm.send(x, other)
        elif comm.rank == other:
            comm.recv(x, 0)
""", "Rank 0 sends far more than the others: everything passes through it. In a ring all ranks do "
            "the same."),
    Mistake("""
def ring_all_reduce(comm, x):
    p, me, chunks = comm.size, comm.rank, x.tensor_split(comm.size)
    inbox = torch.empty_like(chunks[me])
    for far in range(1, p):
        comm.sendrecv(chunks[(me + far) % p], (me + far) % p, inbox, (me - far) % p)
        chunks[me].add_(inbox)
    for far in range(1, p):
        comm.sendrecv(chunks[me], (me + far) % p, chunks[(me - far) % p], (me - far) % p)
""", "Each rank sends to all others, straight. In a ring it sends to its right only, and passes on "
            "what came from its left."),
    *(Mistake({"range(p - 1):\n        leaving, arriving = " + phase:
               "range(p):\n        leaving, arriving = " + phase},
              "A step too many: each of the two phases needs p − 1 steps, not p.")
      for phase in (FIRST, SECOND)),
    Mistake({"chunks = x.tensor_split(p)": "chunks, copy = x.tensor_split(p), x.clone()"},
            "A whole copy of x is made (clone, cat, stack, x + …, tolist). Add and overwrite in "
            "place: chunks from x.tensor_split(p) are views of x."),
    Mistake({"summand = inbox[: len(arriving)]": "summand = inbox",
             "inbox = torch.empty_like(chunks[0])": "inbox = torch.empty_like(chunks[me])"},
            "The inbox is as long as one chunk, and chunks differ in length by one: make it as long "
            "as the longest, chunks[0], and receive into as much of it as comes, inbox[:len(chunk)]."),
    Mistake({"chunks = x.tensor_split(p)": "k = len(x) // p; chunks = [x[r * k : (r + 1) * k if r < "
             "p - 1 else None] for r in range(p)]", "empty_like(chunks[0])": "empty_like(chunks[-1])"},
            "One chunk takes the whole remainder of n / p, and its sender sends too much: lengths "
            "may differ by one element, as those of x.tensor_split(p) do."),
]
