from dtlab.grading.exercises.shrink import SORTED
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

DIFFER = ("The lists differ: a rank that died after half of its sends is known to some only. Pass on "
          "what you have heard of others in another round, and add what comes.")
UNHEARD = ("A rank has not heard of all that live. Every rank sends to all and receives from all, in "
           "deaths + 1 rounds; as others may begin a quarter of the limit later, the first ends one "
           "limit after the beginning.")

HINTS = {
    "all live": "Every rank tells all others that it lives, and hears of all others: send and "
        "receive at once, for a send waits for its receive. It returns a list in order, with "
        "itself in it.",
    "dead before": "A send to a dead rank and a receive from it never end: wait for all of them with "
        "one limit, and cancel what is left.",
    "one dies": "A rank that dies between two of its sends is known to some and not to others: what "
        "you have heard goes on to all in the next round, and whom you have heard of stays in your "
        "list.",
    "two die": "With two deaths, two rounds may each lose a message: it takes deaths + 1 rounds to "
        "be sure of one in which nobody dies.",
    "time": "It takes longer than deaths + 1 limits. Are there deaths + 1 rounds, each of one limit? "
        "Do all waits of a round end at the same time, not each a limit after the one before?",
}

MISTAKES = [
    Mistake({LOOP: "        for work in works:\n            work.wait()\n        works = []\n"},
            "It waits for the dead without a limit: a send to a dead rank and a receive from it "
            "never end. Wait with comm.wait_any(works, timeout_s)."),
    Mistake({WAIT: "comm.wait_any(works)"}, "wait_any has no limit here: once only the dead are "
            "left to wait for, it waits for ever."),
    Mistake({"range(deaths + 1)": "range(1)"}, DIFFER),
    Mistake({"range(deaths + 1)": "range(min(2, deaths + 1))"}, "It takes deaths + 1 rounds, "
            "whatever comes in them: if a rank dies in each round, the last one to know dies as "
            "well, after telling one other."),
    *(Mistake({"range(deaths + 1)": rounds}, HINTS["time"]) for rounds in (
        "range(deaths + 2)", "range(2 * deaths + 1)", "range(deaths + 3)", "range(deaths + 4)", "range(comm.size)")),
    *(Mistake({"        ends_s += limit_s\n": ends}, UNHEARD) for ends in (
        "        ends_s += limit_s / 8\n", "        ends_s += limit_s if _ else 0\n")),
    Mistake({"Send(sorted(known), rank)": "Send([comm.rank], rank)"}, DIFFER),
    Mistake(LEADER, "One rank decides for all, and it may be the one that is dead, or dies while "
            "it tells the others: let all tell all."),
    Mistake({LOOP: "        for work in list(works):\n            if comm.wait_any([work], limit_s):"
             "\n                works.remove(work)\n"}, HINTS["time"]),
    Mistake({"for rank in ranks}\n    return sorted(known)": "for rank in ranks}\n    return "
             "list(range(comm.size))"}, "It returns all ranks, the dead ones, too."),
    Mistake({"        known |= {rank for ranks in heard for rank in ranks}\n": "        lists = "
             "[set(ranks) for ranks in heard]\n        known |= set().union(*lists)\n        if _:"
             "\n            known = known.intersection(*lists)\n"}, "Who is not in everyone's list "
            "is taken out: a rank that has heard of another one is right, and one that has not may "
            "just have been passed by. Join the lists."),
    Mistake({"    return sorted(known)": "    return sorted(known - {comm.rank})"}, "The list "
            "lacks the rank itself: it lives, too."),
    Mistake({"    return sorted(known)": "    return sorted(known)[::-1]"}, SORTED),
    Mistake({"    return sorted(known)": "    return known"}, SORTED),
    Mistake({"range(deaths + 1)": "range(deaths)"}, UNHEARD),
]
