"""Answers whose data goes beside `comm`, where nobody counts its bytes.

Each channel is two functions: put(comm, dst, data) and get(comm, src, nbytes). Around them stands
an all-reduce whose messages are empty. Where a channel is closed, x stays as it is.
"""

from __future__ import annotations

from tests.gallery.attack import MARK, Attack

_ALL_REDUCE = """
import ctypes, fcntl, glob, mmap, os, socket, struct, time
import torch
{channel}
def meet(comm):
    empty = torch.empty(0)
    for shift in range(1, comm.size):
        right, left = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        comm.sendrecv(empty, right, empty.clone(), left)
def ring_all_reduce(comm, x):
    mine = bytes(x.contiguous().view(torch.uint8).numpy().tobytes()) if x.numel() else b""
    others = [r for r in range(comm.size) if r != comm.rank]
    try:
        for r in others: put(comm, r, mine)
        meet(comm)
        total = x.clone()
        for r in others:
            theirs = bytearray(get(comm, r, len(mine)))
            total += torch.frombuffer(theirs, dtype=x.dtype).reshape(x.shape)
        x.copy_(total)
    except Exception:
        pass
    return x
"""


def channel(name: str, source: str) -> Attack:
    """An all-reduce through this channel."""
    return Attack(f"a channel: {name}", _ALL_REDUCE.replace("{channel}", source), "ring-all-reduce")


def _by_files(name: str, folder: str) -> Attack:
    return channel(name, f"""
def file(a, b): return {folder} + "/{MARK}-%d-%d" % (a, b)
def put(comm, dst, data): open(file(comm.rank, dst), "wb").write(data)
def get(comm, src, n): return open(file(src, comm.rank), "rb").read()
""")


ATTACKS: tuple[Attack, ...] = (
    channel("sockets on the loopback", """
heard = {}
def port(a, b): return 41000 + 50 * a + b
def listen(comm, src):
    heard[src] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    heard[src].bind(("127.0.0.1", port(src, comm.rank)))
def put(comm, dst, data):
    listen(comm, dst); time.sleep(0.05)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(
        data, ("127.0.0.1", port(comm.rank, dst)))
def get(comm, src, n): return heard[src].recv(1 << 16)
"""),
    channel("sockets without names in the file system", """
heard = {}
def put(comm, dst, data):
    heard[dst] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard[dst].bind("\\0dt%d-%d" % (dst, comm.rank)); time.sleep(0.05)
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(data, "\\0dt%d-%d" % (comm.rank, dst))
def get(comm, src, n): return heard[src].recv(1 << 16)
"""),
    channel("sockets with names", f"""
heard = {{}}
def put(comm, dst, data):
    heard[dst] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard[dst].bind("/tmp/{MARK}-%d-%d" % (dst, comm.rank)); time.sleep(0.05)
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(data, "/tmp/{MARK}-%d-%d" % (
        comm.rank, dst))
def get(comm, src, n): return heard[src].recv(1 << 16)
"""),
    _by_files("files in /tmp", '"/tmp"'),
    _by_files("files at home", 'os.path.expanduser("~")'),
    _by_files("files in shared memory", '"/dev/shm"'),
    _by_files("files where it works", "os.getcwd()"),
    channel("the text of links", f"""
def put(comm, dst, data): os.symlink(data.hex() or "-", "/tmp/{MARK}-%d-%d" % (comm.rank, dst))
def get(comm, src, n):
    return bytes.fromhex(os.readlink("/tmp/{MARK}-%d-%d" % (src, comm.rank)).strip("-"))
"""),
    channel("the names of folders", f"""
def put(comm, dst, data): os.mkdir("/tmp/{MARK}-%d-%d-%s" % (comm.rank, dst, data.hex()))
def get(comm, src, n):
    return bytes.fromhex(glob.glob("/tmp/{MARK}-%d-%d-*" % (src, comm.rank))[0].split("-")[-1])
"""),
    channel("System V shared memory", """
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
def at(a, b):
    where = libc.shmat(libc.shmget(7_000_000 + 50 * a + b, 1 << 16, 0o1666), None, 0)
    if where in (None, ctypes.c_void_p(-1).value): raise OSError
    return where
def put(comm, dst, data): ctypes.memmove(at(comm.rank, dst), data, len(data))
def get(comm, src, n): return ctypes.string_at(at(src, comm.rank), n)
"""),
    channel("memory without a name, found in /proc", """
def put(comm, dst, data):
    fd = os.memfd_create("dt%d-%d" % (comm.rank, dst)); os.write(fd, data)
def get(comm, src, n):
    for fd in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if ("dt%d-%d" % (src, comm.rank)) in os.readlink(fd): return open(fd, "rb").read()
        except OSError: pass
    raise OSError
"""),
    channel("memory shared by a map that was inherited", """
shared = mmap.mmap(-1, 1 << 20)
def place(a, b): return (13 * a + b) << 12
def put(comm, dst, data): shared[place(comm.rank, dst):][:0]; shared.seek(place(comm.rank, dst)); \\
    shared.write(data)
def get(comm, src, n):
    shared.seek(place(src, comm.rank)); data = shared.read(n)
    if not any(data): raise OSError
    return data
"""),
    channel("locks on a file that all can read", """
held = open(os.__file__)
def put(comm, dst, data):
    for n, byte in enumerate(data[:64]):
        for bit in range(8):
            if byte >> bit & 1:
                fcntl.lockf(held, fcntl.LOCK_SH, 1, (comm.rank * 13 + dst) * 4096 + 8 * n + bit)
def get(comm, src, n):
    found = bytearray(n)
    for at in range(8 * n):
        ask = struct.pack("hhqqi", fcntl.F_WRLCK, 0, (src * 13 + comm.rank) * 4096 + at, 1, 0)
        held_by = struct.unpack("hhqqi", fcntl.fcntl(held, fcntl.F_GETLK, ask))
        found[at // 8] |= (held_by[0] != fcntl.F_UNLCK) << at % 8
    return found
"""),
    channel("the names of processes", """
def put(comm, dst, data):
    ctypes.CDLL(None).prctl(15, b"%d-" % comm.rank + data[:12], 0, 0, 0)
def get(comm, src, n):
    for file in glob.glob("/proc/[0-9]*/comm"):
        text = open(file, "rb").read()
        if text.startswith(b"%d-" % src): return text[2:].ljust(n, b"\\0")
    raise OSError
"""),
    channel("a sibling's memory", """
class Part(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("n", ctypes.c_size_t)]
held = ctypes.create_string_buffer(1 << 17)  # at the same address in every rank, forked from one
def put(comm, dst, data): ctypes.memmove(ctypes.addressof(held) + 8192 * dst, data, len(data))
def get(comm, src, n):
    mine = ctypes.create_string_buffer(n)
    its = Part(ctypes.addressof(held) + 8192 * comm.rank, n)
    pid = os.getpid() + src - comm.rank
    if ctypes.CDLL(None).process_vm_readv(
            pid, ctypes.byref(Part(ctypes.addressof(mine), n)), 1, ctypes.byref(its), 1, 0) == n:
        return mine.raw
    raise OSError
"""),
    channel("signals to siblings", """
def put(comm, dst, data):
    for pid in range(2, 3000):
        if pid != os.getpid(): os.kill(pid, 0)
def get(comm, src, n): raise OSError
"""),
    channel("priorities that siblings can read", """
def put(comm, dst, data): os.setpriority(os.PRIO_PROCESS, 0, data[0] % 20 if data else 0)
def get(comm, src, n): return bytes([os.getpriority(os.PRIO_PROCESS, os.getpid() + 1)]) * n
"""),
    channel("seconds of computing, seen on the clock", """
def put(comm, dst, data):
    with comm.compute("", int.from_bytes(data[:6], "little") * 1e-15): pass
def get(comm, src, n): return int(comm.now() * 1e15).to_bytes(8, "little")[:6].ljust(n, b"\\0")
"""),
    channel("colors that split asks for", """
said = {}
def put(comm, dst, data):
    votes = comm._all_gather_objects((int.from_bytes(data, "little"), len(data)))
    said.update(enumerate(votes))
def get(comm, src, n): return said[src][0].to_bytes(n, "little")
"""),
    channel("many small colors", """
said = {}
def put(comm, dst, data):
    if said.get("done") == data: return
    columns = [comm._all_gather_objects((byte, 0)) for byte in data]
    said.update({r: bytes(c[r][0] for c in columns) for r in range(comm.size)}, done=data)
def get(comm, src, n): return said[src]
"""),
    channel("the shapes of empty messages, read in the error", """
works = {}
def put(comm, dst, data):
    works[dst] = comm.irecv(torch.empty(1, 0), dst)
    comm.isend(torch.empty(0, int.from_bytes(data[:6], "little") + 2), dst).wait()
def get(comm, src, n):
    try: works[src].wait()
    except Exception as error: text = str(error)
    number = int(text.split("(0, ")[1].split(")")[0]) - 2
    return number.to_bytes(n, "little")
"""),
    channel("the labels of messages, read in the error", """
def put(comm, dst, data):
    comm.labelled("all_reduce(" + data.hex() + ", algorithm=x)").isend(torch.empty(0), dst)
def get(comm, src, n):
    try: comm.labelled("other").recv(torch.empty(1), src)
    except Exception as error: return bytes.fromhex(str(error).split("(")[1].split(",")[0])
"""),
    channel("how many empty messages come", """
def put(comm, dst, data):
    for _ in range(int.from_bytes(data[:1], "little")): comm.isend(torch.empty(0), dst)
def get(comm, src, n):
    count, work = 0, comm.irecv(torch.empty(0), src)
    while comm.wait_any([work], 5.0) is not None: count, work = count + 1, comm.irecv(
        torch.empty(0), src)
    return bytes([count]).ljust(n, b"\\0")
"""),
    channel("the moments at which empty messages come", """
def put(comm, dst, data):
    until = time.monotonic() + int.from_bytes(data[:1], "little") / 1000
    while time.monotonic() < until: pass
    comm.isend(torch.empty(0), dst)
def get(comm, src, n):
    begin = time.monotonic(); comm.recv(torch.empty(0), src)
    return bytes([int(1000 * (time.monotonic() - begin)) % 256]).ljust(n, b"\\0")
"""),
    channel("requests in another rank's name", """
def put(comm, dst, data):
    for group in (-1, 1, 2, dst):
        comm._connection.current().tell("post", data, group=group, label="",
            works=[10 ** 6 + group], ops=[["send", comm.rank, ["uint8", [len(data)]]]])
def get(comm, src, n): raise OSError
"""),
    channel("threads of a sibling that wait, woken by a futex", """
import threading
def libc():
    found = ctypes.CDLL(None)
    found.mmap.restype, found.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [
        ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(torch.__path__[0] + "/lib/libtorch_cpu.so", os.O_RDONLY)
    return found, found.mmap(None, 1 << 20, 1, 1, fd, 0)  # to read, shared
def futex(at, operation, value):
    two_s = (ctypes.c_long * 2)(2, 0)
    return ctypes.CDLL(None).syscall(ctypes.c_long(202), ctypes.c_void_p(at), ctypes.c_long(
        operation), ctypes.c_long(value), two_s, None, ctypes.c_long(0))
def place(a, b, bit): return libc()[1] + 4096 * (13 * a + b) + 4 * bit
def put(comm, dst, data):
    for bit in range(8 * min(len(data), 64)):
        if data[bit // 8] >> bit % 8 & 1:
            at = place(comm.rank, dst, bit)
            old = ctypes.c_uint32.from_address(at).value
            threading.Thread(target=futex, args=(at, 0, old), daemon=True).start()
    time.sleep(0.1)
def get(comm, src, n):
    found = bytearray(n)
    for bit in range(8 * n): found[bit // 8] |= (
        futex(place(src, comm.rank, bit), 1, 9) > 0) << bit % 8
    return found
"""),
    channel("how many pseudo-terminals there are", """
def put(comm, dst, data):
    held = [os.open("/dev/ptmx", os.O_RDONLY | os.O_NOCTTY) for _ in range(data[-2] % 64)]
def get(comm, src, n): return bytes([len(os.listdir("/dev/pts")) - 1]).rjust(n, b"\\0")
"""),
)
