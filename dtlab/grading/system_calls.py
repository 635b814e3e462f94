"""The system calls that a rank of a submission may make: those to compute, read and answer.

Everything else is refused with EPERM, whatever the sandbox around it: sockets, processes and
programs, signals to others, writing or making files, shared memory, locks, looking into other
processes. So the only way from one rank to another is through the referee, and nothing outlives the
rank. The rules are libseccomp's (seccomp(2)); only Linux has them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import sys

_ALLOWED = """
brk mmap munmap mprotect mremap set_robust_list rseq sched_yield sched_getaffinity
membarrier arch_prctl exit exit_group restart_syscall
gettid getpid getppid getuid geteuid getgid getegid uname getrusage times getrandom
gettimeofday time nanosleep
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
close read readv pread64 lseek fstat stat lstat newfstatat statx getdents64 readlink readlinkat
access faccessat faccessat2 getcwd chdir dup
write writev sendto recvfrom poll ppoll select pselect6
"""
_GLOO = """
socket bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
sendmsg recvmsg socketpair epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2
pipe pipe2
"""

_FUTEX_PRIVATE = 128  # <linux/futex.h>: of this process alone
_FUTEX_WAITS = (0, 9, 9 | 256)  # FUTEX_WAIT, FUTEX_WAIT_BITSET, and with FUTEX_CLOCK_REALTIME
_LAST_CLOCK = 11  # <linux/time.h>; negative numbers are clocks of other processes
_MADV_KEEPONFORK = 19  # <asm-generic/mman-common.h>
_FIONBIO = 0x5421  # <asm-generic/ioctls.h>
_CLONE_THREAD = 0x10000  # <linux/sched.h>
_PR_SET_DUMPABLE = 4  # <linux/prctl.h>
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FCNTL = (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, 1030)  # F_DUPFD_CLOEXEC


def can_restrict() -> bool:
    """Does this machine have libseccomp?"""
    try:
        import pyseccomp  # noqa: F401
    except (ImportError, RuntimeError, AttributeError, OSError):
        return False
    return sys.platform == "linux"


def restrict(gloo: bool = False) -> None:
    """Let this process make, from here on, no system calls but these. gloo: it may use sockets.
    Raises `OSError`, or what importing libseccomp raises, if that can't be had."""
    import pyseccomp as seccomp

    def equals(argument: int, value: int) -> seccomp.Arg:
        return seccomp.Arg(argument, seccomp.EQ, value)

    def masked(argument: int, mask: int, value: int) -> seccomp.Arg:
        return seccomp.Arg(argument, seccomp.MASKED_EQ, mask, value)

    # Its memory is nobody's to read in /proc, not even another rank's of the same user.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))  # of all the user's processes together
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in (_ALLOWED + (_GLOO if gloo else "")).split():
        rules.add_rule(seccomp.ALLOW, name)
    rules.add_rule(seccomp.ALLOW, "futex", masked(1, _FUTEX_PRIVATE, _FUTEX_PRIVATE))
    for operation in _FUTEX_WAITS:  # glibc asks again, until a thread has ended. Who really waited
        rules.add_rule(seccomp.ERRNO(errno.EAGAIN), "futex", equals(1, operation))  # could be woken
    for name in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        rules.add_rule(seccomp.ALLOW, name, seccomp.Arg(0, seccomp.LE, _LAST_CLOCK))
    # Later ones take pages of files out of memory, which a sibling notices when it reads them.
    rules.add_rule(seccomp.ALLOW, "madvise", seccomp.Arg(2, seccomp.LE, _MADV_KEEPONFORK))
    rules.add_rule(seccomp.ALLOW, "open", masked(1, _WRITES, 0))
    rules.add_rule(seccomp.ALLOW, "openat", masked(2, _WRITES, 0))
    rules.add_rule(seccomp.ALLOW, "clone", masked(0, _CLONE_THREAD, _CLONE_THREAD))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # glibc then takes clone
    # To read its own limits: who lowers one that siblings share could count what they take.
    rules.add_rule(seccomp.ALLOW, "prlimit64", equals(0, 0), equals(2, 0))
    for name in ("kill", "tgkill"):  # to itself
        rules.add_rule(seccomp.ALLOW, name, equals(0, os.getpid()))
    rules.add_rule(seccomp.ALLOW, "ioctl", equals(1, _FIONBIO))  # a socket's time limit
    for command in _FCNTL:  # and no locks
        rules.add_rule(seccomp.ALLOW, "fcntl", equals(1, command))
    rules.load()
