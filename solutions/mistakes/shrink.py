from dtlab.grading.mistakes import Mistake

WAIT = "comm.wait_any(works, max(0.0, ends_s - comm.now()))"
LOOP = f"        while works and (done := {WAIT}):\n            works.remove(done)\n"
LEADER = '''
def survivors(comm, deaths, limit_s):
    def hears(rank, seconds):
        inbox = []
        work = comm.irecv(inbox, rank)
        if comm.wait_any([work], seconds) is None:
            work.cancel()
        return inbox

    def tells(x, rank, seconds):
        work = comm.isend(x, rank)
        if comm.wait_any([work], seconds) is None:
            work.cancel()

    if comm.rank == 0:
        end = comm.now() + limit_s
        inboxes = {r: [] for r in range(1, comm.size)}
        works = [comm.irecv(inboxes[r], r) for r in inboxes]
        while works and (done := comm.wait_any(works, max(0.0, end - comm.now()))):
            works.remove(done)
        for work in works:
            work.cancel()
        living = [0, *(r for r, inbox in inboxes.items() if inbox)]
        for r in living[1:]:
            tells(living, r, limit_s / 2)
        return living
    tells(comm.rank, 0, limit_s)
    heard = hears(0, limit_s * 1.4)
    return heard[0] if heard else [comm.rank]
'''

HINTS = {
    "all live": "Every rank tells all others that it lives, and hears of all others: send and "
        "receive at once, for a send waits for its receive. It returns a list in order, with "
        "itself in it.",
    "dead before": "A send to a dead rank and a receive from it never end: wait for all of them with "
        "one limit, and cancel what is left.",
    "one dies": "A rank that dies between two of its sends is known to some and not to others: tell "
        "each other what you know in another round.",
    "two die": "With two deaths, two rounds may each lose a message: it takes deaths + 1 rounds to "
        "be sure of one in which nobody dies.",
    "time": "deaths + 1 rounds of one limit each: all waits of a round end at the same time.",
}

MISTAKES = [
    Mistake({LOOP: "        for work in works:\n            work.wait()\n        works = []\n"},
            "It waits for the dead without a limit: a send to a dead rank and a receive from it "
            "never end. Wait with comm.wait_any(works, timeout_s)."),
    Mistake({WAIT: "comm.wait_any(works)"}, "wait_any has no limit here: once only the dead are "
            "left to wait for, it waits for ever."),
    Mistake({"range(deaths + 1)": "range(1)"}, "Each rank takes its own view: one that died after "
            "half of its sends is known to some only. Tell each other what you know, in a second "
            "round."),
    Mistake({"range(deaths + 1)": "range(min(2, deaths + 1))"}, "A round too few: if a rank dies in "
            "each round, the last one to know dies as well, after telling one other. It takes "
            "deaths + 1."),
    *(Mistake({"range(deaths + 1)": rounds}, "More rounds than it takes: among deaths + 1 there is "
              "one without a death, and after it all know the same.") for rounds in (
        "range(deaths + 3)", "range(deaths + 4)", "range(comm.size)")),
    *(Mistake({"        ends_s += limit_s\n": ends}, "A round ends before the others have sent: "
              "they may begin a quarter of the limit later. The first ends one limit after the "
              "beginning.") for ends in (
        "        ends_s += limit_s / 8\n", "        ends_s += limit_s if _ else 0\n")),
    Mistake({"Send(sorted(known), rank)": "Send([comm.rank], rank)"}, "Every round tells only that "
            "the sender lives: pass on what you have heard of others."),
    Mistake(LEADER, "One rank decides for all, and it may be the one that is dead, or dies while "
            "it tells the others: let all tell all."),
    Mistake({LOOP: "        for work in list(works):\n            if comm.wait_any([work], limit_s):"
             "\n                works.remove(work)\n"}, "Time-outs are in the wrong order: a limit "
            "for each wait, one after the other, takes longer than the round, for which the others "
            "wait. All waits of a round end with it."),
    Mistake({"for rank in ranks}\n    return sorted(known)": "for rank in ranks}\n    return "
             "list(range(comm.size))"}, "It returns all ranks, the dead ones, too."),
    Mistake({"        known |= {rank for ranks in heard for rank in ranks}\n": "        lists = "
             "[set(ranks) for ranks in heard]\n        known |= set().union(*lists)\n        if _:"
             "\n            known = known.intersection(*lists)\n"}, "Who is not in everyone's list "
            "is taken out: a rank that has heard of another one is right, and one that has not may "
            "just have been passed by. Join the lists."),
    Mistake({"    return sorted(known)": "    return sorted(known - {comm.rank})"}, "The list "
            "lacks the rank itself: it lives, too."),
    Mistake({"    return sorted(known)": "    return sorted(known)[::-1]"}, "Return a list, in "
            "order."),
    Mistake({"    return sorted(known)": "    return known"}, "Return a list, in order."),
]
