from dtlab.grading.mistakes import Mistake

REDUCE = 'all_reduce(comm, vector, "avg", algorithm="ring")'
FULL, LAST = "sum(map(len, bucket)) >= least", " or number == 0"
HOLDS = "A bucket is closed once it holds at least `least` elements, and not before."

HINTS = {
    "averages": "Join a bucket with torch.cat, average it over the ranks (op=\"avg\"), and copy "
        "each part back into its own gradient: split it by the lengths of the gradients, in the order in which they were "
        "joined: `bucket.split([len(g) for g in ...])`.",
    "any sizes": "It fails where the last bucket isn't full, or a gradient is small.",
    **dict.fromkeys(("messages", "order"), "Fill the buckets from the end of `grads`; close each "
        "once it holds `least` elements, and begin the next one empty. Nothing else travels."),
}

MISTAKES = [
    Mistake({'"avg", ': ""}, "The gradients are summed, but not averaged: divide by the number of "
            "ranks, or op=\"avg\"."),
    Mistake({"g.copy_(piece)": "g.copy_(piece / comm.size)"}, "The average is divided by the number "
            "of ranks once more: op=\"avg\" does it by itself."),
    Mistake({f"            {REDUCE}\n": ""}, "Nothing is sent, so each rank has its own gradients "
            "still: call all_reduce on each bucket."),
    *(Mistake({"    bucket = []\n    for": "    bucket, held = [], 0\n    for", FULL: "held >= least",
               "bucket.append(grad)": "bucket.append(grad)\n        held += len(grad)",
               "            bucket = []\n": f"            bucket = []{more}\n"}, "The count of a "
              "bucket's elements doesn't begin at 0: what the bucket before held counts no more.")
      for more in ("", "\n            held -= least")),
    Mistake({LAST: ""}, "The last bucket is lost: what is left when the loop ends, though not full, "
            "must be reduced, too."),
    Mistake({"g.copy_(piece)": "g = piece"}, "Nothing has changed in `grads`: copy the averages "
            "back out of the bucket, in place (`g.copy_(piece)`; `g = piece` only renames)."),
    Mistake({"zip(bucket, vector.split([len(g) for g in bucket])": "zip(bucket[::-1], "
             "vector.split([len(g) for g in bucket[::-1]])"}, "The parts go back in another order "
            "than the one in which they were joined."),
    Mistake({"reversed(list(enumerate(grads)))": "[(len(grads) - 1 - i, g) for i, g in "
             "enumerate(grads)]"}, "The buckets begin with the first gradient. Backward computes "
            "the last layer's first: go through `grads` from its end."),
    Mistake({FULL: "True"}, "Each gradient travels alone: join them (torch.cat) until a bucket "
            "holds `least` elements (not bytes)."),
    Mistake({FULL: "False"}, "Everything travels at once: close a bucket as soon as it holds "
            "`least` elements."),
    Mistake({FULL: "sum(map(len, bucket)) > least"}, "A bucket that holds just `least` elements is "
            "full: " + HOLDS[0].lower() + HOLDS[1:]),
    Mistake({FULL + LAST: "number == 0 or sum(map(len, bucket)) + len(grads[number - 1]) > least"},
            "A bucket is closed before it overflows, so it may hold too little. " + HOLDS),
    Mistake({"            bucket = []\n": ""}, "The bucket is never emptied, so its gradients travel "
            "again with each later bucket: begin a new one after each all-reduce."),
    Mistake({FULL: "len(bucket) >= least"}, "`least` counts elements, not gradients: a bucket's size "
            "is the sum of its gradients' lengths."),
    Mistake({"split([len(g) for g in bucket])": "chunk(len(bucket))", "strict=True": "strict=False"},
            "The gradients have different lengths: split the bucket by these, not into equal parts."),
    Mistake("""
import torch
from dtlab.collectives import all_reduce
def average_in_buckets(comm, grads, least):
    grads = grads[::-1]
    whole = torch.cat(grads)
    for bucket in whole.split(least):
        all_reduce(comm, bucket, "avg", algorithm="ring")
    for g, piece in zip(grads, whole.split([len(g) for g in grads])):
        g.copy_(piece)
""", "Buckets of just `least` elements cut gradients in two: each holds whole gradients, so it may "
            "hold more."),
    Mistake("""
import torch
from dtlab.collectives import all_reduce
def average_in_buckets(comm, grads, least):
    lengths, whole = [0], torch.cat(grads)
    for g in reversed(grads):
        lengths += [0] * (lengths[-1] >= least)
        lengths[-1] += len(g)
    for bucket in whole.split(lengths):
        all_reduce(comm, bucket, "avg", algorithm="ring")
    for g, piece in zip(grads, whole.split([len(g) for g in grads])):
        g.copy_(piece)
""", "The buckets have the right lengths, but hold other gradients, or parts of them: the first bucket "
            "holds the last gradients, whole ones."),
    Mistake({"reversed(list(enumerate(grads)))": "reversed(list(enumerate(grads[1:])))"}, "The first "
            "gradient is left out: a loop from the end must reach number 0."),
]
