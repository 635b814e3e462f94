from dtlab.grading.mistakes import Mistake

WRITE = ('        disk.write("partial", hashlib.sha256(data).digest() + data)\n'
         '        disk.sync("partial")\n'
         '        disk.rename("partial", str(state["step"]))\n')
REMOVE = "        for number in older[:-1]:\n            disk.remove(str(number))\n"
WHOLE = "if hashlib.sha256(content[32:]).digest() == content[:32]:"
DIRECT = ('        disk.write(str(state["step"]), hashlib.sha256(data).digest() + data)\n'
          '        disk.sync(str(state["step"]))\n')
POINTER = '''
def checkpoints(disk):
    def save(state):
        data = pickle.dumps(state)
        yield
        name = f"{state['step'] % 2}"
        SAVE

    def load():
        if "latest" not in disk.names():
            return None
        name = disk.read("latest").decode()
        content = disk.read(name) if name in disk.names() else b""
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        return pickle.loads(content[32:])

    return save, load
'''
DATA = "disk.write(name, hashlib.sha256(data).digest() + data); disk.sync(name)"
MOVE = 'disk.write("new", name.encode()); disk.sync("new"); disk.rename("new", "latest")'


def pointer(*steps: str) -> str:
    return POINTER.replace("SAVE", "; ".join(steps))


HINTS = {
    "no kill": "What save has kept under one name, load has to find again, in another process: only "
        "the disk is left of the first one. load returns the whole state, as save was given it.",
    "beside training": "The training changes the weights in place as soon as save has yielded: make "
        "a copy before that. Bytes are one.",
    **dict.fromkeys(("killed", "power cut"), "Is there at every moment one whole checkpoint that "
        "load would choose? Write under another name, sync, rename, and only then remove what is "
        "older. Three saves take at most 40 operations."),
    "damage": "Keep two checkpoints, each with a checksum, and let load pass over the one whose "
        "bytes are not what they were.",
    "room": "Remove what is older than the two newest.",
}

MISTAKES = [
    Mistake({"        yield\n": ""}, "save has no yield, so it is a function: make it a generator. The "
            "training waits until its one `yield`; the rest runs beside it."),
    Mistake(pointer(MOVE, DATA), "The pointer moves first: if the process dies before the data is "
            "there, it leads to nothing whole. Data first, then the pointer."),
    Mistake({WRITE + REMOVE: "        for number in older:\n            disk.remove(str(number))\n"
             + WRITE}, "The old checkpoint is removed first: if the process dies before the new one "
            "is there, none is left. Remove it last."),
    Mistake({'        disk.sync("partial")\n': ""}, "Are the bytes synced before the rename? The new "
            "name is safe at once, the bytes are not. After a power cut it names half a file, and "
            "the one before may be gone."),
    Mistake({WRITE: WRITE.replace('        disk.sync("partial")\n', "")
             + '        disk.sync(str(state["step"]))\n', "older[:-1]": "older"}, "It syncs after "
            "the rename, and keeps no other: a power cut between them leaves the new name with "
            "half of the bytes. Sync before the rename."),
    Mistake({WHOLE: "if content:"}, "A file that is torn or damaged is taken for whole: put a "
            "checksum of all its bytes before the data, and compare."),
    Mistake({WRITE: DIRECT, WHOLE: "if content:"}, "A torn file is taken for whole: it has its "
            "last name before its bytes are safe. Write under another name, sync, rename; and a "
            "checksum tells whether the bytes are all there."),
    Mistake({"        data = pickle.dumps(state)\n        yield\n":
             "        yield\n        data = pickle.dumps(state)\n"}, "The save is beside the "
            "training, and it stores weights of a later step under the name of this one: it kept "
            "a reference to the live tensor, as a copied dictionary does, too. Make the bytes, or "
            "clone the tensor, before the yield."),
    Mistake({WHOLE: "state = pickle.loads(content[32:])\n            " + WHOLE}, "Bytes reach "
            "pickle.loads before they are compared with their checksum: of damaged ones it makes "
            "anything, or raises. Compare first."),
    Mistake({"older[:-1]": "older"}, "Only one checkpoint is kept: when a disk damages its bytes, "
            "there is no other. Keep the one before, too."),
    Mistake({f"            {WHOLE}\n        ": f"            if {WHOLE[3:-1].replace('==', '!=')}:\n"
             "                return None\n    "}, "load gives up at the first file that is damaged, "
            "though the one before is whole: go on to that."),
    Mistake({REMOVE: ""}, "Old checkpoints are never removed, and the disk fills up: keep two."),
    Mistake({"reversed(numbers())": "numbers()"}, "An older checkpoint is loaded than the last that "
            "was saved: does load look for the largest step first?"),
    Mistake({"return sorted(int(name) for name in disk.names() if name.isdecimal())":
             "return sorted((name for name in disk.names() if name.isdecimal()), reverse=False)"},
            "Names are sorted as texts, where \"10\" comes before \"9\": compare numbers."),
    Mistake(pointer(DATA, MOVE).replace("        return pickle.loads(content[32:])",
            "        return pickle.loads(content[32:])").replace(
            "if hashlib.sha256(content[32:]).digest() != content[:32]:\n            return None",
            "if hashlib.sha256(content[32:]).digest() != content[:32]:\n            "
            "raise ValueError(\"corrupt\")"), "A damaged file ends in an error, though the other "
            "checkpoint is whole: let load pass over the one, and try the one before."),
]
