from dtlab.grading.mistakes import Mistake

RETURN, BY_ROOM = "[host for rack in most_room_first for host in rack][:ranks]", ", reverse=True"

HINTS = {
    "a placement": "Return a list of host numbers, one for each rank of the job.",
    **dict.fromkeys(("time, empty racks", "time, busy racks", "bytes over the spine", "small jobs"),
        "Let all hosts of a rack stand next to each other in the list, and begin with the racks "
        "that have most free hosts."),
}

MISTAKES = [
    Mistake({RETURN: "free[:ranks]"}, "The ring leaves a rack and comes back, again and again. Let "
            "all hosts of a rack stand next to each other in the list."),
    Mistake({RETURN: "[host for host in free if host in " + RETURN + "]"}, "The hosts are the right "
            "ones, but their order takes the ring from rack to rack: let all hosts of a rack stand "
            "next to each other."),
    Mistake({BY_ROOM: ""}, "The job lies in more racks than it needs: begin with the racks that "
            "have most free hosts."),
    Mistake({"sorted(room.values(), key=len, reverse=True)": "[room[rack] for rack in sorted(room)]"},
            "The job lies in more racks than it needs: begin with the racks that have most free "
            "hosts, not with rack 0."),
    Mistake({"for host in free:": "for host in range(len(rack_of)):"},
            "Only hosts that are in `free` may be used; the others have a job."),
    Mistake({"[:ranks]": ""}, "A job of p ranks gets p hosts, each one once."),
    Mistake({RETURN: "[rack_of[host] for host in " + RETURN + "]"},
            "Return the numbers of hosts, not of racks."),
]
