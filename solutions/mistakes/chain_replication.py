from dtlab.grading.mistakes import Mistake

HINTS = {
    "no crash": "Each node carries out every add, once for each number: values[key] grows by amount. "
        "The tail, the last to have an add, answers: (\"done\", number) to an add, (\"value\", number, "
        "value) to a read.",
    "asked again": "The same message may come again, from the client or from the node before: "
        "remember the numbers of adds that you have carried out, and pass these on without adding.",
    **dict.fromkeys(("head dies", "tail dies"), "The tail answers every add, also one that it has "
        "had already: the first answer may have been lost with the node that sent it. Which node "
        "is the tail now?"),
    "middle dies": "Each node keeps what it has passed on until the tail's acknowledgement comes "
        "back; when the chain changes, it sends all of that to its new successor.",
    "two die": "An acknowledged add is lost, so it was acknowledged too early, or forgotten too "
        "early. Only the tail may answer the client: what it has, all nodes have. Each node keeps "
        "what it has passed on until the tail's acknowledgement comes back; when the chain "
        "changes, it sends all of that to its new successor.",
    "messages": "An add costs one message down each link, one back up, and the answer.",
}

MISTAKES = [
    Mistake({'node["values"].get(message[2], 0) + message[3]': "message[3]"}, "An add replaces the value: "
            "amount is added to values[key], which is 0 at first."),
    Mistake({"number not in had": "message[2] not in had", "had.add(number)": "had.add(message[2])"},
            "Only the first add of each key counts: remember an add by its `number`, not by its key."),
    Mistake({"            kept[add[1]] = add\n": ""}, "Messages on their way to the dead node are "
            "lost, and no node sends them again: each node keeps what it has passed on until the "
            "tail's acknowledgement comes back; when the chain changes, it notes the new one, and "
            "sends all of that to its new successor."),
    Mistake({"        return answer if before is None else": "        return answer if True else"},
            "A node may forget an add once the tail has it: let the tail's acknowledgement travel "
            "back up the chain, node by node."),
    Mistake({"    if number not in had:\n        had.add(number)\n        node": "    if True:\n"
             "        node"}, "An add was carried out twice. The same message may come again, from "
            "the client or from the node before: remember the numbers of adds that you have carried "
            "out, and pass these on without adding."),
    Mistake({"    return pass_on(message)": "        return pass_on(message)\n    return []",
             '[*answer, (before, ("ack", add[1]))]': '[(before, ("ack", add[1])), *answer]'},
            "The client waits for an answer that never comes. The tail answers every add, also one "
            "that it has had already: the first answer may have been lost with the node that sent "
            "it."),
    Mistake({"return [(after, add)]": "return [(after, add)] if before is not None else "
             "[(after, add), (\"client\", (\"done\", add[1]))]"}, "A read doesn't see an add that "
            "was acknowledged before the read was sent: the tail, which answers reads, must be the "
            "last to have an add, and the one that acknowledges it."),
    Mistake({'answer = [("client", ("done", add[1]))]': "answer = []"},
            "The client waits for an answer that never comes: the tail answers every add."),
    Mistake({"return [] if before is None else [(before, message)]":
             'return [(before, message), (node["me"], message)]'}, "The messages never end: does a "
            "node answer a message that needs no answer, or send one to itself?"),
    Mistake({'number, node["values"].get(message[2], 0)': 'number, node["values"].get(message[2])'},
            "(\"value\", number, value): the value is node[\"values\"].get(key, 0), a whole number."),
    Mistake({'had: set[int] = node.setdefault("had", set())': 'shared = chain_node.__dict__\n'
             '    if message[:2] == ("add", 1):\n        shared.clear()\n'
             '    had: set[int] = shared.setdefault("had", set())',
             'node["values"]': 'shared.setdefault("values", {})'}, "A node knows only what its own "
            "messages have brought: what another node has in its memory is out of reach."),
    Mistake({"    def pass_on(": "    def star(add: tuple[Any, ...]) -> list[tuple[Any, Any]]:\n"
             "        out = [(n, add) for n in node[\"chain\"][1:] if node[\"me\"] == node[\"chain\"]"
             "[0]]\n        last = node[\"me\"] == node[\"chain\"][-1]\n        return [*out, "
             "(\"client\", (\"done\", add[1]))] if last else out\n\n    def pass_on(",
             "return pass_on(message)": "return star(message)"}, "The head sends each add to all nodes "
            "itself, so the tail may acknowledge one that is still on its way to the middle: pass it "
            "on from node to node, then what the tail has, all have."),
]
