"""The frames of a collective say what really happened."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from dtlab import Comm, ConfigError, Deadlock, RankFailed, collectives, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.recording import CollectiveFrame, frames_of, stepper_frames
from dtlab.recording.recorder import RECORDED_WITH
from dtlab.recording.specification import Specification, arguments
from dtlab.topology import uniform
from tests.oracle import ALGORITHMS as EVERY

SIZES = [1, 2, 5, 8]


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("p", SIZES)
def test_every_registered_algorithm_ends_complete(collective: str, algorithm: str, p: int) -> None:
    for root in {0, p // 2, p - 1}:
        frames = stepper_frames(collective, algorithm, p, root)
        assert frames[-1].done, frames[-1].holds
        assert [frame.step for frame in frames] == list(range(len(frames)))
        assert not any(frame.wrong.any() for frame in frames)
        for before, after in itertools.pairwise(frames):  # nothing that is wanted is lost again
            ours = before.judged[..., None] & before.wanted
            assert (after.holds[ours] >= before.holds[ours]).all()
            assert np.array_equal(after.changed, (after.holds != before.holds).any(axis=2))


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
@pytest.mark.parametrize("p", SIZES)
def test_arrows_are_the_messages_of_an_unwatched_run(
    collective: str, algorithm: str, p: int
) -> None:
    fn = ALGORITHMS[collective][algorithm]
    frames = stepper_frames(collective, algorithm, p)
    goal = Specification.of(collective, p, 0, frames[0].pieces if frames[0].what == "piece" else p)
    options = RECORDED_WITH.get((collective, algorithm), {})

    def plain(comm: Comm) -> None:
        fn(comm, **arguments(fn, goal, comm.rank, p, 0), **options)

    trace = simulate(plain, network=uniform(p, 1.0, float("inf")), overhead_s=0.0).trace
    shown = Counter((a.src, a.dst, a.nbytes) for frame in frames for a in frame.arrows)
    assert shown == Counter((m.src, m.dst, m.nbytes) for m in trace.transfers)
    assert frames[-1].sent_bytes == frames[-1].total_bytes == trace.sent_bytes()
    assert frames[-1].steps == len({m.end_s for m in trace.transfers})
    if collective == "all_reduce":
        assert frames[-1].vector_bytes == frames[-1].pieces * p * 4


@pytest.mark.parametrize("p", [2, 4, 7])
def test_each_message_of_the_ring_carries_one_piece(p: int) -> None:
    frames = stepper_frames("all_reduce", "ring", p)
    assert len(frames) == 1 + 2 * (p - 1)
    for frame in frames[1:]:
        assert {(a.src, a.dst) for a in frame.arrows} == {(r, (r + 1) % p) for r in range(p)}
        assert all(len(arrow.pieces) == 1 for arrow in frame.arrows)
        for arrow in frame.arrows:  # what arrived is in the piece that the arrow names
            assert frame.holds[arrow.dst, arrow.pieces[0], arrow.src] == 1


def test_halfway_the_ring_rank_r_has_the_whole_of_piece_r_plus_1() -> None:
    frame = stepper_frames("all_reduce", "ring", 5)[4]
    assert np.array_equal(np.argwhere(frame.complete), [[r, (r + 1) % 5] for r in [0, 1, 2, 3, 4]])


def test_a_piece_added_twice_is_shown_as_spoilt() -> None:
    def greedy(comm: Comm, x: torch.Tensor) -> None:
        inbox = torch.empty_like(x)
        for _ in range(comm.size):  # one time too often: one's own comes back
            out = x.clone()
            comm.sendrecv(out, (comm.rank + 1) % comm.size, inbox, (comm.rank - 1) % comm.size)
            comm.accumulate_(x, inbox)

    last = frames_of(greedy, 3)[-1]
    assert last.wrong.all()
    assert not last.done
    assert last.holds.max() > 1


def test_a_ring_that_stops_early_is_not_done() -> None:
    def half(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        p, me = comm.size, comm.rank
        chunks, inbox = x.chunk(p), torch.empty(p)
        for step in range(p - 1):
            comm.sendrecv(chunks[(me - step) % p], (me + 1) % p, inbox, (me - 1) % p)
            comm.accumulate_(chunks[(me - step - 1) % p], inbox)
        return x

    frames = frames_of(half, 4)
    assert not frames[-1].done
    assert frames[-1].complete.sum() == 4
    assert "half" in frames[0].title


def test_a_result_in_a_new_tensor_is_shown() -> None:
    def gather_and_add(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        for distance in range(1, comm.size):
            other = torch.empty_like(x)
            comm.sendrecv(x, (comm.rank + distance) % comm.size, other,
                          (comm.rank - distance) % comm.size)
            total = total + other
        return total / comm.size  # an average counts like a sum

    assert frames_of(gather_and_add, 4)[-1].done


def test_errors_of_the_learners_function_come_through() -> None:
    def stuck(comm: Comm, x: torch.Tensor) -> None:
        comm.recv(x, (comm.rank + 1) % comm.size)

    def broken(comm: Comm, x: torch.Tensor) -> None:
        raise ValueError("no luck")

    with pytest.raises(Deadlock):
        frames_of(stuck, 3)
    with pytest.raises(RankFailed, match="no luck"):
        frames_of(broken, 3)


@pytest.mark.parametrize("bad", [
    lambda: stepper_frames("all_reduce", "telepathy", 4),
    lambda: stepper_frames("gossip", "ring", 4),
    lambda: stepper_frames("all_reduce", "ring", 0),
    lambda: stepper_frames("all_reduce", "ring", 33),
    lambda: stepper_frames("broadcast", "flat", 4, root=4),
])
def test_what_does_not_exist_is_a_config_error(bad: object) -> None:
    with pytest.raises(ConfigError):
        bad()  # type: ignore[operator]


def test_a_parameter_that_nobody_can_give_is_named() -> None:
    with pytest.raises(RankFailed, match="'wheels'") as caught:
        frames_of(lambda comm, x, wheels: None, 2)
    assert isinstance(caught.value, ConfigError)


def all_gather(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(comm.size, *x.shape)
    out[comm.rank] = x
    for distance in range(1, comm.size):
        src = (comm.rank - distance) % comm.size
        comm.sendrecv(x, (comm.rank + distance) % comm.size, out[src], src)
    return out


def reduce_scatter(comm: Comm, parts: torch.Tensor, op: str = "sum") -> torch.Tensor:
    inbox = torch.empty_like(parts[0])
    for distance in range(1, comm.size):
        dst, src = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(parts[dst].clone(), dst, inbox, src)
        comm.accumulate_(parts[comm.rank], inbox, op)
    return parts[comm.rank]


def scan(comm: Comm, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    if comm.rank:
        inbox = torch.empty_like(x)
        comm.recv(inbox, comm.rank - 1)
        comm.accumulate_(x, inbox, op)
    if comm.rank < comm.size - 1:
        comm.send(x, comm.rank + 1)
    return x


@pytest.mark.parametrize("fn", [all_gather, reduce_scatter, scan, collectives.all_to_all,
                                collectives.scatter])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_collectives_of_other_signatures_are_shown_too(fn: object, p: int) -> None:
    frames = frames_of(fn, p, fn.__name__, root=p - 1)  # type: ignore[arg-type, attr-defined]
    assert frames[-1].done
    assert frames[-1].pieces == p


def test_memory_that_nobody_wrote_counts_as_empty() -> None:
    first = frames_of(all_gather, 4, "all_gather")[0]
    assert np.array_equal(first.holds.sum(axis=2), np.eye(4))


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_the_first_frame_is_what_the_ranks_begin_with(collective: str, algorithm: str) -> None:
    p, root = 6, 2
    first = stepper_frames(collective, algorithm, p, root)[0]
    k = first.pieces
    spec = Specification.of(collective, p, root, k)
    own = np.broadcast_to(np.eye(p)[:, None, :], (p, k, p)).copy()  # own[r, j]: only r, in all j
    if spec.start == "root":
        own[[r for r in range(p) if r != root]] = 0
    if spec.start == "piece":
        own *= np.eye(p)[:, :, None]
    assert np.array_equal(first.holds, own)
    assert np.array_equal(spec.given, own)


def test_a_scattered_piece_is_there_once_it_has_come() -> None:
    frames = stepper_frames("scatter", "binomial", 8)
    assert [int(frame.complete.sum()) for frame in frames] == [1, 2, 4, 8]


def test_who_passes_pieces_on_is_seen_to_have_them() -> None:
    frames = stepper_frames("scatter", "binomial", 8)
    assert frames[1].holds[4].any(axis=1).tolist() == [j >= 4 for j in range(8)]  # for its subtree
    up = stepper_frames("gather", "binomial", 8, root=3)[-2]
    assert up.holds[7].any(axis=1).tolist() == [j in (7, 0, 1, 2) for j in range(8)]


@pytest.mark.parametrize("p", SIZES)
def test_bruck_all_gathers_the_ranks_ahead_doubling_them_each_round(p: int) -> None:
    for k, frame in enumerate(stepper_frames("all_gather", "bruck", p)):
        for rank in range(p):
            ahead = {(rank + d) % p for d in range(min(2**k, p))}
            assert set(np.flatnonzero(frame.holds[rank].any(axis=1))) == ahead


@pytest.mark.parametrize("p", SIZES)
def test_in_brucks_all_to_all_a_piece_hops_by_the_bits_of_its_way(p: int) -> None:
    """After round k, what rank c has for rank j is where the low k+1 bits of j − c lead."""
    for k, frame in enumerate(stepper_frames("all_to_all", "bruck", p)):
        seen = {(rank, j, c) for c in range(p) for j in range(p) for done in range(k + 1)
                for rank in [(c + ((j - c) % p & (2**done - 1))) % p]}
        assert set(zip(*map(np.ndarray.tolist, frame.holds.nonzero()), strict=True)) == seen


@pytest.mark.parametrize("p", [3, 5, 8])
def test_an_all_to_all_that_ends_in_the_wrong_order_is_shown_as_spoilt(p: int) -> None:
    def forgets_to_turn_back(comm: Comm, parts: torch.Tensor) -> torch.Tensor:
        right = ALGORITHMS["all_to_all"]["bruck"](comm, parts)
        return right.roll(1, dims=0)

    frames = frames_of(forgets_to_turn_back, p, "all_to_all")
    assert not any(frame.wrong.any() for frame in frames[:-1])
    assert np.array_equal(frames[-1].wrong, np.eye(p, dtype=bool))
    assert not frames_of(lambda comm, parts: parts[:1], p, "all_to_all")[-1].complete.any()


@pytest.mark.parametrize("p", [2, 3, 5])
def test_whose_piece_lies_in_a_wrong_place_is_shown(p: int) -> None:
    def as_they_came(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        return ALGORITHMS["all_gather"]["bruck"](comm, x).roll(-comm.rank, dims=0)

    last = frames_of(as_they_came, p, "all_gather")[-1]
    assert last.complete[0].all(), "rank 0 has nothing to turn"
    assert last.wrong[1:].all()
    for rank in range(1, p):
        assert last.holds[rank].argmax(axis=1).tolist() == [(rank + j) % p for j in range(p)]


def test_a_function_with_its_segments_filled_in_is_named_and_shown() -> None:
    chain = ALGORITHMS["broadcast"]["chain"]
    frames = frames_of(partial(chain, segments=6), 4, "broadcast")
    assert frames[0].title == "broadcast, chain"
    assert frames[0].pieces == 6
    assert frames[-1].done


@pytest.mark.parametrize("p", [2, 3, 5, 9])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_a_chain_is_shown_in_its_segments(collective: str, p: int) -> None:
    frames = stepper_frames(collective, "chain", p)
    assert frames[0].pieces == 8
    assert frames[0].steps == p - 2 + 8
    for frame in frames[1:]:
        assert all(len(arrow.pieces) == 1 for arrow in frame.arrows)
        assert frame.changed.sum() == len(frame.arrows), "a piece more, for each message"


@pytest.mark.parametrize("p", SIZES[1:])
def test_rabenseifners_reduce_is_shown_in_the_chunks_that_it_cuts(p: int) -> None:
    core = 1 << (p.bit_length() - 1)
    frames = stepper_frames("reduce", "rabenseifner", p, root=p // 2)
    assert frames[0].pieces in {core, p}
    halved = frames[core.bit_length() - 1 + (p > core)]  # after the reduce-scatter
    whole = (halved.holds == 1).all(axis=2)
    assert (whole.sum(axis=0) == 1).all(), "each chunk complete, on one rank"
    assert whole.sum() == halved.pieces
    assert all(arrow.pieces for frame in frames for arrow in frame.arrows)


def test_an_unknown_collective_is_shown_but_not_judged() -> None:
    last = frames_of(scan, 3, "rumour")[-1]
    assert not last.judged.any()
    assert last.holds[2].all()


def test_a_barrier_shows_whose_news_has_spread() -> None:
    frames = stepper_frames("barrier", next(iter(ALGORITHMS["barrier"])), 6)
    assert frames[0].what == "arrivals"
    assert np.array_equal(frames[0].holds[:, 0], np.eye(6))
    assert frames[-1].holds.all()


def test_watching_changes_nothing() -> None:
    seen: list[CollectiveFrame] = stepper_frames("all_reduce", "ring", 4)
    again = stepper_frames("all_reduce", "ring", 4)
    assert all(np.array_equal(a.holds, b.holds) for a, b in zip(seen, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
    x = torch.arange(16.0)
    frames_of(lambda comm, given: ALGORITHMS["all_reduce"]["ring"](comm, x, "sum"), 4)
    assert torch.equal(x, torch.arange(16.0))  # what the function closes over is copied


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_a_double_tree_can_be_followed(p: int) -> None:
    frames = stepper_frames("all_reduce", "double_tree", p)
    assert len(frames) - 1 <= 2 * p.bit_length()
    for frame in frames:
        pairs = [(arrow.src, arrow.dst) for arrow in frame.arrows]
        assert len(pairs) == len(set(pairs)), "one arrow between two ranks"


@pytest.mark.parametrize("p", SIZES[1:])
@pytest.mark.parametrize(("collective", "algorithm"), [
    ("reduce", "binomial"), ("reduce", "chain"), ("all_reduce", "tree")])
def test_partial_sums_are_shown_where_they_stand(collective: str, algorithm: str, p: int) -> None:
    """Of a reduce not in x, which stays as it is on all ranks but the root."""
    frames = stepper_frames(collective, algorithm, p)
    summed = frames[-1] if collective == "reduce" else frames[(p - 1).bit_length()]
    counts = summed.holds.sum(axis=2)  # (rank, piece)
    wanted = [min(rank & -rank, p - rank) if rank else p for rank in range(p)]  # its subtree
    if algorithm == "chain":
        wanted = [p - rank for rank in range(p)]
    assert (counts == np.array(wanted)[:, None]).all()
