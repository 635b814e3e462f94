"""Closed forms, and the questions that they answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from dtlab.checks import check_amount, check_choice, check_each, check_name, check_whole
from dtlab.errors import ConfigError
from dtlab.machine import Machine, check_machine


class Form(NamedTuple):
    """The cost of one call."""

    rounds: float  # messages one after the other on the longest path
    path_bytes: float  # bytes that cross that path
    reduced_bytes: float  # bytes reduced along it
    sent_bytes: list[int]  # by rank
    messages: list[int]  # sent, by rank
    exact: bool = True  # False: the time is an upper bound
    # Of the rounds, those whose message its sender posts together with the one before, as pairs of
    # their number and their size. They start while the bytes of the one before still flow.
    together: tuple[tuple[int, int], ...] = ()
    # How many messages a rank waits for one by one; None: the rounds that are not `together`.
    awaited: float | None = None

    def seconds(
        self, alpha: float, beta: float, gamma: float, overhead: float = math.inf
    ) -> float:
        """The time of the longest path: rounds·α + path_bytes·β + reduced_bytes·γ; but a message of
        m bytes that is posted together with the one before takes max(o, mβ) instead of α + mβ.

        overhead: o, the seconds between the starts of two messages of one rank; at most α.
        """
        time_s = self.rounds * alpha + self.path_bytes * beta + self.reduced_bytes * gamma
        for count, nbytes in self.together:
            flow_s = nbytes * beta
            time_s += count * (max(min(overhead, alpha), flow_s) - (alpha + flow_s))
        return time_s

    @property
    def waits(self) -> float:
        """The most messages that a rank waits for one by one."""
        if self.awaited is not None:
            return self.awaited
        return self.rounds - sum(count for count, _ in self.together)

    def then(self, second: Form) -> Form:
        """The form of this call and a second one after it: every term adds."""
        return Form(
            self.rounds + second.rounds,
            self.path_bytes + second.path_bytes,
            self.reduced_bytes + second.reduced_bytes,
            [a + b for a, b in zip(self.sent_bytes, second.sent_bytes, strict=True)],
            [a + b for a, b in zip(self.messages, second.messages, strict=True)],
            self.exact and second.exact,
            self.together + second.together,
            self.waits + second.waits,
        )


MOST_RANKS = 1 << 20  # forms hold a number for each rank
FormOf = Callable[[int, int, int], Form]  # (ranks, nbytes, itemsize) → Form

FORMS: dict[tuple[str, str], FormOf] = {}
Function = TypeVar("Function", bound=Callable[..., Any])
_remembered: list[Any] = []


def costs(collective: str, algorithm: str) -> Callable[[FormOf], FormOf]:
    """Register the decorated function as the closed form of an algorithm."""

    def register(function: FormOf) -> FormOf:
        FORMS[collective, algorithm] = function
        forget()
        return function

    return register


def remembered(function: Function) -> Function:
    """Keep what `function` returns, for equal arguments; until anything new is registered, for it
    follows from the algorithms and closed forms that there are."""
    _remembered.append(lru_cache(maxsize=65536)(function))
    return _remembered[-1]  # type: ignore[no-any-return]


def forget() -> None:
    """Something has been registered: ask all that is `remembered` anew."""
    for function in _remembered:
        function.cache_clear()


def has_form(collective: str, algorithm: str) -> bool:
    """Is there a closed form? For an algorithm that was registered without one, there isn't."""
    check_name("collective", collective)
    check_name("algorithm", algorithm)
    return (collective, algorithm) in FORMS


def form(collective: str, algorithm: str, ranks: int, nbytes: int, itemsize: int = 4) -> Form:
    """The closed form of one call, for root 0.

    nbytes: the size of the vector that textbooks call n. The whole of it for broadcast, reduce,
    all-reduce and scans; one rank's contribution times p for scatter, gather, all-gather,
    reduce-scatter and all-to-all. itemsize: bytes per element, for vectors are cut between
    elements, not within. Raises `ConfigError` if there is no such form.
    """
    _check_sizes(ranks, nbytes, itemsize)
    if not has_form(collective, algorithm):
        known = ", ".join(f"{c} {a}" for c, a in sorted(FORMS))
        raise ConfigError(f"no closed form for {collective!r} {algorithm!r}; there are: {known}")
    call = FORMS[collective, algorithm](ranks, int(nbytes), itemsize)
    if not isinstance(call, Form):
        raise ConfigError(f"the closed form of {collective} {algorithm!r} must return a "
                          f"dtlab.cost.Form, not {call!r}")
    return call


def time_s(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    itemsize: int = 4,
) -> float:
    """Seconds that the algorithm takes on a uniform network: what the simulator says; at least that
    if its form is not `exact` (`form(…).exact`).

    alpha: seconds per message. beta: seconds per byte sent. gamma: seconds per byte reduced.
    The other arguments as for `form`.

    >>> time_s("all_reduce", "ring", 4, 4000, alpha=1e-6, beta=1e-9)  # 2·3·(1 µs + 1000 B)
    1.2e-05
    """
    check_rates(alpha, beta, gamma)
    return form(collective, algorithm, ranks, nbytes, itemsize).seconds(alpha, beta, gamma)


def sent_bytes(
    collective: str, algorithm: str, ranks: int, nbytes: int, itemsize: int = 4
) -> list[int]:
    """Bytes that each rank sends, by rank, for root 0."""
    return form(collective, algorithm, ranks, nbytes, itemsize).sent_bytes


def messages(
    collective: str, algorithm: str, ranks: int, nbytes: int, itemsize: int = 4
) -> list[int]:
    """Messages that each rank sends, by rank, for root 0."""
    return form(collective, algorithm, ranks, nbytes, itemsize).messages


def rounds(collective: str, algorithm: str, ranks: int, nbytes: int, itemsize: int = 4) -> float:
    """Count the messages that follow one another on the longest path: what α multiplies."""
    return form(collective, algorithm, ranks, nbytes, itemsize).rounds


def predicted_s(
    collective: str, algorithm: str, ranks: int, nbytes: int, machine: Machine, itemsize: int = 4
) -> float:
    """Seconds of one call on `machine`: all work, shared by its lanes, and for the other lanes than
    one the longest path, on which they may have to wait. No schedule that leaves a lane idle only
    if there is nothing to do takes longer; none takes less than the longer of the `bounds_s`.

    Source: Brent 1974, "The parallel evaluation of general arithmetic expressions", lemma 2.
    """
    path_s, work_s = bounds_s(collective, algorithm, ranks, nbytes, machine, itemsize)
    return work_s + (1 - 1 / max(machine.lanes, 1)) * path_s


def bounds_s(
    collective: str, algorithm: str, ranks: int, nbytes: int, machine: Machine, itemsize: int = 4
) -> tuple[float, float]:
    """Seconds of the longest path, which is the closed form, and of all messages of all ranks on
    the machine's lanes. On a network without end only the first counts; where p processes share a
    few cores, the second.

    Of messages that a rank posts together, only the first costs α. Each further one adds the
    overhead o to the path, and to the work twice that: its sender and its receiver are busy with
    it.
    Source: Culler et al. 1993, "LogP: towards a realistic model of parallel computation".
    """
    check_machine(machine)
    call = form(collective, algorithm, ranks, nbytes, itemsize)
    alpha, beta, gamma, lanes = machine[:4]
    overhead = min(machine.overhead, alpha)
    path_s = call.seconds(alpha, beta, gamma, overhead)
    messages, sent_bytes = sum(call.messages), sum(call.sent_bytes)
    together = max(messages - ranks * call.waits, 0)
    work_s = (messages - together) * alpha + together * min(2 * overhead, alpha)
    work_s += sent_bytes * beta
    return path_s, work_s / lanes


def lower_bound_s(
    collective: str, ranks: int, nbytes: int, alpha: float, beta: float, gamma: float = 0.0
) -> float:
    """No algorithm can take less where each rank has one port, full-duplex: it sends at most one
    message at a time, and receives at most one.

    Each term is a bound of its own; their sum is what the literature draws. Units as in `time_s`.
    Source: Chan, Heimlich, Purkayastha, van de Geijn 2007, table 1.
    """
    _check_sizes(ranks, nbytes)
    check_rates(alpha, beta, gamma)
    p, n = ranks, nbytes
    lg, part = lg_ceil(p), (p - 1) / p
    bounds = {
        "broadcast": (lg, n if p > 1 else 0, 0.0),
        "reduce": (lg, n if p > 1 else 0, part * n),
        "all_reduce": (lg, 2 * part * n, part * n),
        "barrier": (lg, 0, 0.0),
        "scatter": (lg, part * n, 0.0),
        "gather": (lg, part * n, 0.0),
        "all_gather": (lg, part * n, 0.0),
        "reduce_scatter": (lg, part * n, part * n),
        "all_to_all": (lg, part * n, 0.0),
        "scan": (lg, n if p > 1 else 0, part * n),
        "exscan": (lg, n if p > 1 else 0, 0.0),
    }
    check_choice("collective", collective, bounds)
    a, b, c = bounds[collective]
    return a * alpha + b * beta + c * gamma


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth = bytes/time × this factor: comparable between rank counts.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md; scans, which it lacks, as broadcast and reduce.
    """
    _check_sizes(ranks)
    part = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * part} | dict.fromkeys(
        ("broadcast", "reduce", "scan", "exscan", "barrier"), 1.0
    )
    factors |= dict.fromkeys(
        ("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), part
    )
    check_choice("collective", collective, factors)
    return factors[collective]


def _check_sizes(ranks: int, nbytes: float = 0, itemsize: int = 1) -> None:
    """Raise `ConfigError` unless these can be numbers of ranks and bytes."""
    check_whole("ranks", ranks, most=MOST_RANKS)
    if isinstance(nbytes, float) and nbytes.is_integer():  # such as 1e6
        nbytes = int(nbytes)
    check_whole("nbytes", nbytes, least=0)
    check_whole("itemsize", itemsize)


def check_rates(alpha: float, beta: float, gamma: float) -> None:
    """Raise `ConfigError` unless these are seconds: 0 or more, and finite."""
    check_each(check_amount, " seconds", alpha=alpha, beta=beta, gamma=gamma)


def lg_ceil(p: int) -> int:
    """⌈log2 p⌉, exactly."""
    return (int(p) - 1).bit_length()


def best_divisor(p: int) -> int:
    """The largest divisor of p that is at most √p: the default size of groups and grids."""
    return next(d for d in range(math.isqrt(p), 0, -1) if p % d == 0)


PIECE_BYTES = 1 << 20  # of the pipelined rings, by default


def pipelined(ring: Form, chunk: int, itemsize: int) -> Form:
    """The form of a ring whose chunks, of up to `chunk` bytes, travel in pieces: at most
    α + sβ + (N−1)·max(α, sβ), s bytes in the largest of N pieces, and all additions, as if none hid
    behind sending."""
    k = -(-chunk // PIECE_BYTES)
    if not ring.rounds or k < 2:
        return ring
    piece, pieces = chunk_bytes(chunk, k, itemsize)[0], int(ring.rounds) * k
    reduced = ring.reduced_bytes / chunk * k * piece
    return Form(pieces, pieces * piece, reduced, ring.sent_bytes, [pieces] * len(ring.messages),
                exact=False, together=((pieces - 1, piece),), awaited=pieces)


def chunk_bytes(nbytes: int, parts: int, itemsize: int) -> list[int]:
    """Sizes of the pieces when a vector is cut as torch.tensor_split cuts it: big ones first."""
    if nbytes % itemsize:
        itemsize = math.gcd(nbytes, itemsize)
    small, extra = divmod(nbytes // itemsize, parts)
    return [(small + (part < extra)) * itemsize for part in range(parts)]
