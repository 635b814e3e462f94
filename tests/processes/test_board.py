"""What the launcher reads from the board of a rank that waits for many messages at once."""

from __future__ import annotations

import os

import pytest

from dtlab.processes.board import ALL, EXCHANGE, Board, bit
from dtlab.processes.transfer import memory_file

RANKS, ME, CONTEXT = 70, 5, 0


@pytest.fixture
def board() -> Board:
    fd = memory_file("board")
    made = Board(fd, RANKS)
    os.close(fd)
    return made


def waits(board: Board, origins: list[int], goals: list[int]) -> bool:
    """Is rank 5 stuck, once it has posted one receive from each of `origins`, a send to `goals`?"""
    for src in origins:
        board.set_count(src, ME, True, CONTEXT, 1)
    for dst in goals:
        board.set_count(ME, dst, False, CONTEXT, 1)
    board.write(ME, 1, EXCHANGE, True, False, CONTEXT, 8, sum(map(bit, origins)), ALL,
                True, sum(map(bit, goals)), ALL)
    return board.stuck(ME, board.state(ME))


def test_who_waits_for_all_is_stuck_until_the_last_has_come(board: Board) -> None:
    origins, goals = [0, 3, 62], [1, 62]
    assert waits(board, origins, goals)
    for src in origins:
        board.set_count(src, ME, False, CONTEXT, 1)
    assert waits(board, origins, goals)
    board.set_count(ME, 1, True, CONTEXT, 1)
    assert waits(board, origins, goals)
    board.set_count(ME, 62, True, CONTEXT, 1)
    assert not waits(board, origins, goals)


def test_a_full_set_fits_and_ranks_beyond_it_are_never_held_for_missing(board: Board) -> None:
    assert not waits(board, [63, 69], [64])
    everyone = [rank for rank in range(RANKS) if rank != ME]
    assert waits(board, everyone, everyone)
    for rank in everyone[:62]:  # all whom the set can name
        board.set_count(rank, ME, False, CONTEXT, 1)
        board.set_count(ME, rank, True, CONTEXT, 1)
    assert not waits(board, everyone, everyone)
