"""Answers that look alike, for a person to judge: two learners may also have had the same idea."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from rapidfuzz.distance import Indel

SIMILAR = 0.9  # the share of tokens that two answers have in common, in order
SHORTEST = 60  # tokens; a shorter answer can hardly be written in another way
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENCODING, tokenize.ENDMARKER}


class Pair(NamedTuple):
    """Two learners' answers to one exercise. share: from `SIMILAR` to 1."""

    share: float
    exercise: str
    first: str
    second: str


def similar_pairs(answers: Mapping[str, Mapping[str, str]]) -> list[Pair]:
    """The pairs of answers that share most of their tokens, the most alike first.

    answers: learner → exercise → code. Comments, spaces and line breaks don't count; names do.
    """
    found = []
    tokens = {learner: {exercise: tokens_of(code) for exercise, code in each.items()}
              for learner, each in answers.items()}
    for (first, mine), (second, theirs) in combinations(sorted(tokens.items()), 2):
        for exercise in sorted(mine.keys() & theirs.keys()):
            if min(len(mine[exercise]), len(theirs[exercise])) >= SHORTEST:
                share = Indel.normalized_similarity(mine[exercise], theirs[exercise],
                                                    score_cutoff=SIMILAR)
                if share:
                    found.append(Pair(round(share, 3), exercise, first, second))
    return sorted(found, key=lambda pair: (-pair.share, *pair[1:]))


def tokens_of(code: str) -> list[str]:
    """The tokens of `code`, as far as it is Python."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type not in _SKIPPED:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError, RecursionError):
        pass
    return found
