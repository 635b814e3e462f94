from dtlab.grading.mistakes import Mistake

BLAKE = 'int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")'
NAMES = 'spot(f"{server}/{v}"), server) for server in servers'
ELSEWHERE = ("Python's hash() of a text differs from process to process (or your hash draws random "
             "numbers): workers would ask the wrong servers. Take hashlib: "
             "int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), \"big\").")

COUNTED = ("A key's place depends on how many servers or points there are (a hash modulo their number, "
           "or points at equal distances), which changes with every server: points are hashes of names, "
           "and a key belongs to the first one at or after its own hash (bisect).")
NEXT = ("The copies of a key are the next different servers round the ring, from the key's own place. "
        "Then, when the first dies, the next one is first, and has the copy.")

HINTS = {
    "copies": "The first `copies` different servers round the ring, the one that leads first; all "
        "of them, if there are fewer.",
    "a placement": "Return a dict: each key, and no other, → a list of different servers.",
    "balance": "With few points on the ring, shares are a matter of luck: put each server there "
        "about a hundred times, each time under another name: f\"{server}/{v}\".",
    "a server comes": "The new server takes keys, and nothing else moves. A key's place may "
        "depend on no count of servers (hash mod n does) and on no server's place in the list: "
        "only on the key's hash and the servers' own.",
    "a server dies": "Each key of the dead server has to lead where its second copy is: on the "
        "next other server round the ring, whose keys many servers share. With few points on the ring, shares are a matter of luck: put each server there about a "
        "hundred times, each time under another name: f\"{server}/{v}\".",
    "everywhere the same": "Two workers may list the same servers in another order. A key's place "
        "may depend on no count of servers (hash mod n does) and on no server's place in the "
        "list: only on the key's hash and the servers' own.",
}

MISTAKES = [
    Mistake({BLAKE: "hash(name)"}, ELSEWHERE),
    Mistake({"range(150)": "range(1)"}, "Each server has one point on the ring, or few, so shares "
            "are a matter of luck: put it there many times (a hundred virtual nodes, say), each time "
            "under another name: f\"{server}/{v}\"."),
    Mistake({"        at = bisect.bisect(ring, (spot(key),))": "        at = spot(key)"},
            COUNTED),
    Mistake({NAMES: 'spot(f"{place}/{v}"), server) for place, server in enumerate(servers)'},
            "A place in a list counts, a server's or a key's: in another order, or when a server comes "
            "or dies, others move. Hash the names."),
    Mistake({"            if server not in mine:\n                mine.append(server)":
             "            mine.append(server)"}, "Two copies on one server die together. The next "
            "point on the ring may be the same server's: go on until you find another one."),
    Mistake({"len(mine) < min(copies, len(servers))": "len(mine) < 1"},
            "Each key is on `copies` servers; on all, if there are fewer. Here it is on one."),
    Mistake({"ring[at % len(ring)]": "ring[at]"}, "Behind the last point the ring begins anew: take "
            "the index modulo the number of points."),
    Mistake({"return placed": "return {key: mine[0] for key, mine in placed.items()}"},
            "Each key has a *list* of servers, also if it is only one."),
    Mistake({"at += 1": "at += 7919"}, NEXT),
    *(Mistake(change, "When the first server of a key dies, its second must lead: they are the next "
              "different servers round the ring, in this order (not backwards, not sorted, no set).")
      for change in ({"placed[key] = mine": "placed[key] = sorted(mine)"}, {"at += 1": "at -= 1"})),
    Mistake({f"sorted(({NAMES} for v in range(150))": "[(2**64 * place // len(servers), server) "
             "for place, server in enumerate(sorted(servers))]"}, COUNTED),
    Mistake({"        while len": "        line = sorted(servers)\n        at = "
             "line.index(ring[at % len(ring)][1])\n        while len", "ring[at % len(ring)][1]\n"
             "            if": "line[at % len(line)]\n            if"}, NEXT),
    Mistake({BLAKE: "sum(map(ord, name))"}, "Names that are alike lie side by side, or at one place: "
            "take a hash that spreads them, from hashlib."),
]
