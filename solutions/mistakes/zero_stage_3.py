from dtlab.grading.mistakes import Mistake

FORWARD, BACKWARD = "layer.forward(whole(i), x)", "layers[i].backward(whole(i), inputs.pop(), grad)"
REDUCE = 'reduce_scatter(comm, padded.view(comm.size, -1), op="avg")'
ALL_REDUCE = '(__import__("dtlab").collectives.all_reduce(comm, padded, "avg")).view(comm.size, -1)'

HINTS = {
    "gradients": "The loss is half the sum of the squares of the last layer's output, so backward "
        "begins with that output; each layer's backward takes the input that its forward had. "
        "Each gradient's average over the ranks is what reduce_scatter(…, op=\"avg\") leaves.",
    "any size": "It fails where N does not divide a layer: its shards are padded with zeros. Cut "
        "the gathered vector to layer.numel, and pad the gradient again, at its end.",
    "peak": "Are all layers gathered before the first runs, is one that has been used still held, "
        "in a list or a variable, or are whole gradients kept until the end? Gather one, use it, "
        "free it.",
    "traffic": "Two gathers of each layer, one for forward and one for backward, and a reduce-scatter "
        "of its gradient are enough. (An all-reduce sends as much as a reduce-scatter and a gather.)",
}

MISTAKES = [
    Mistake({', op="avg"': ""}, "The gradients are summed, but not averaged: divide by the number "
            "of ranks, or op=\"avg\"."),
    Mistake({REDUCE: REDUCE + " / comm.size"},
            "The gradients are divided by the number of ranks twice."),
    Mistake({REDUCE: "padded.view(comm.size, -1)[comm.rank].clone()"},
            "Each rank returns its part of its own gradient: the gradients of all ranks were never "
            "averaged. Reduce-scatter them."),
    Mistake({"    inputs = []": "    def part(i):\n        w = torch.zeros(comm.size, "
             "len(shards[i]), dtype=x.dtype)\n        w[comm.rank] = shards[i]\n        "
             "return w.flatten()[: layers[i].numel]\n\n    inputs = []",
             "backward(whole(i)": "backward(part(i)"},
            "Backward ran with this rank's shard and zeros: forward has freed the weights, so "
            "gather the layer again before its backward."),
    Mistake({"return mine": "return mine[::-1]"}, "The list is in the order of backward: return the "
            "gradients in the order of the layers."),
    Mistake({REDUCE: ALL_REDUCE + ".flatten()"}, "Return this rank's shard of each gradient, "
            "⌈numel/N⌉ elements, not the whole gradient: reduce-scatter it."),
    Mistake({REDUCE: REDUCE + "\n        shards[i].copy_(mine[i])"}, "The shards are the model: "
            "gather them into a new tensor, and put the gradients into new ones, too."),
    Mistake({"grad, mine = x,": "grad, mine = torch.ones_like(x),"},
            "The loss is half the sum of the squares of the last layer's output, so backward "
            "begins with that output, not with ones."),
    Mistake({"grad, mine = x,": "grad, mine = x / len(x),"}, "The loss is a sum over the samples, "
            "not their mean: backward begins with the last layer's output itself."),
    Mistake({"inputs.append(x)\n        x = layer": "x = layer", FORWARD: FORWARD
             + "\n        inputs.append(x)"}, "Each layer's backward takes the input that its "
            "forward had, not its output."),
    Mistake({".flatten()[: layers[i].numel]": ".flatten()"},
            "It fails where N does not divide a layer: its shards are padded with zeros. Cut the "
            "gathered vector to layer.numel."),
    Mistake({"padded.view(comm.size, -1)": "grad_w.view(comm.size, -1)", "        del grad_w\n": ""},
            "It fails where N does not divide a layer: pad the gradient with zeros to N equal "
            "parts."),
    Mistake({"grad, grad_w =": "_, grad_w ="}, "Every layer's backward starts from the last "
            "layer's output: pass on the grad_x of the layer behind."),
    Mistake({"reversed(range(len(layers)))": "range(len(layers))", "inputs.pop()": "inputs[i]"},
            "Backward goes through the layers from the first to the last: the gradient comes from "
            "the last one, so begin there."),
    Mistake({"grad, mine = x,": "grad, mine = 2 * x,"}, "The gradient is twice too large: that of "
            "half a sum of squares y²/2 is y."),
    Mistake({"    return mine": "    for shard in shards:\n        shard.zero_()\n    return mine"},
            "The shards that you were given have changed: leave them as they are."),
    Mistake({"    inputs = []": "    kept = {}\n    inputs = []", FORWARD:
             "layer.forward(kept.setdefault(i, whole(i)), x)", "backward(whole(i)":
             "backward(kept[i]"}, "The layers stay gathered from forward to backward (or were "
            "all gathered before the first ran): gather each again, and free it after each use."),
    Mistake({FORWARD: "layer.forward(w := whole(i), x); keep = (globals().get('keep') or [])[-1:] "
             "+ [w]; globals().update(keep=keep)"}, "A layer is held while the next one computes: "
            "free it before, so that it isn't held by any name or list."),
    Mistake({"    inputs = []": "    kept = {}\n    inputs = []", FORWARD:
             "layer.forward(kept.setdefault(i, whole(i)), x)"}, "A layer that has been used is "
            "still held, in a list or a variable, while others are gathered: gather one, use it, "
            "free it."),
    Mistake({"return mine": "return [torch.cat([g] * comm.size)[: len(g)] for g in mine]"},
            "The shards that you return are views, and a view keeps its whole vector alive: "
            ".clone() them."),
    Mistake({REDUCE: ALL_REDUCE + "[comm.rank].clone()"}, HINTS["traffic"]),
]
