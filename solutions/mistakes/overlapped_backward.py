from dtlab.grading.mistakes import Mistake

BEGIN = 'begun.append(comm.begin(all_reduce, layer.grad, "avg", algorithm="ring"))'
WAIT = "    for reduction in begun:\n        reduction.wait()\n"
NOTHING = ("Nothing overlaps: each reduction is waited for before the next layer's backward, or all "
           "begin after the last. Begin it with comm.begin(all_reduce, …) as soon as its gradient "
           "is there, and wait for all at the end.")
TAKES = ("`begin` takes the function and its arguments, but not comm, and calls it itself: "
         "comm.begin(all_reduce, layer.grad, \"avg\").")

HINTS = {
    "averages": "From the last layer to the first: `layer.backward()`, then "
        "`comm.begin(all_reduce, layer.grad, \"avg\")`. `begin` takes the function and its "
        "arguments, but not comm, and calls it itself. Wait for all that began at the end, and "
        "touch no gradient before that: it is under way.",
    **dict.fromkeys(("fast network", "slow network"), "Reduce each layer's gradient by itself, once; "
        "begin as soon as it is there, the last layer's first, and wait for none before all layers "
        "have computed."),
}

MISTAKES = [
    Mistake({'"avg", ': ""}, "The gradients are summed, but not averaged: op=\"avg\", or divide."),
    Mistake({BEGIN: "pass"}, "Each rank has its own gradients still: nothing was reduced."),
    Mistake({BEGIN: BEGIN.replace("layer.grad", "layer.grad.clone()")}, "A copy of each gradient is "
            "reduced: reduce `layer.grad` itself, or assign what wait() returns to it."),
    Mistake({BEGIN: BEGIN + " if layer is not layers[0] else None"}, "The first layer's gradient is "
            "not reduced: it comes last, and needs an all-reduce, too."),
    Mistake({BEGIN: BEGIN + " if layer is not layers[-1] else None"},
            "The last layer's gradient is not reduced, which is there first."),
    Mistake({BEGIN: 'begun.append(comm.begin(all_reduce(comm, layer.grad, "avg")))'}, TAKES),
    Mistake({BEGIN: 'begun.append(comm.begin(all_reduce, comm, layer.grad, "avg"))'}, TAKES),
    Mistake({"reversed(layers)": "layers"}, "Backward goes from the last layer to the first."),
    Mistake({BEGIN: BEGIN + "\n        begun.pop().wait()"}, NOTHING),
    Mistake({BEGIN: BEGIN + "\n        [reduction.wait() for reduction in begun[-2:-1]]",
             WAIT: "    begun[-1].wait()\n"}, "Some reductions hide, but each is waited for after "
            "the next layer's backward: where it takes longer, computing stops. Wait for none "
            "before all layers have computed."),
    Mistake("""
import torch
from dtlab.collectives import all_reduce
def overlapped_backward(comm, layers):
    begun, waiting = [], []
    for layer in reversed(layers):
        layer.backward()
        waiting.append(layer)
        if begun and len(waiting) < 2 and layer is not layers[0]:
            continue  # a bucket of two, but for the first
        bucket = torch.cat([each.grad for each in waiting])
        begun.append((waiting, bucket, comm.begin(all_reduce, bucket, "avg", algorithm="ring")))
        waiting = []
    for bucketed, bucket, work in begun:
        work.wait()
        for each, part in zip(bucketed, bucket.split([len(each.grad) for each in bucketed])):
            each.grad = part
""", "Layers share a reduction: reduce each layer's gradient by itself, as soon as it is there."),
    Mistake({WAIT: WAIT + "    for layer in layers:\n        layer.grad /= comm.size\n"}, "The average "
            "is divided by the number of ranks once more: op=\"avg\" does it by itself."),
    Mistake({WAIT: WAIT + "    for layer in layers:\n        all_reduce(comm, layer.grad, "
             "algorithm=\"ring\")\n"}, "Each gradient is reduced twice: once by begin, and once more "
            "afterwards."),
    Mistake({BEGIN: "pass", WAIT: "    whole = torch.cat([layer.grad for layer in layers])\n"
             "    all_reduce(comm, whole, \"avg\", algorithm=\"ring\")\n    for layer, part in "
             "zip(layers, whole.split([len(x.grad) for x in layers])):\n        layer.grad = part\n"},
            "All gradients travel at once, after backward, so nothing hides: begin one all-reduce for "
            "each layer, as soon as its gradient is there."),
]
