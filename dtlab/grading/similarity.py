"""Answers that look alike, for a person to judge: two learners may also have had the same idea."""

from __future__ import annotations

import io
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from rapidfuzz.distance import Indel

SIMILAR = 0.9  # the share of tokens that two answers have in common, in order
SHORTEST = 60  # tokens; a shorter answer can hardly be written in another way
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENCODING, tokenize.ENDMARKER}


class Alike(NamedTuple):
    """Learners' answers to one exercise: all equal, or two, each perhaps of several learners.
    share: of their tokens, from `SIMILAR` to 1."""

    share: float
    exercise: str
    learners: str


def alike(answers: Mapping[str, Mapping[str, str]]) -> list[Alike]:
    """The answers that share most of their tokens, the most alike first; equal ones are one group.
    answers: learner → exercise → code. Comments, spaces and line breaks don't count; names do."""
    groups: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for learner, each in sorted(answers.items()):
        for exercise, code in each.items():
            if len(tokens := tuple(tokens_of(code))) >= SHORTEST:
                groups[exercise][tokens].append(learner)
    found = []
    for exercise, by_tokens in groups.items():
        found += [Alike(1.0, exercise, ", ".join(same)) for same in by_tokens.values()
                  if len(same) > 1]
        for (mine, first), (theirs, second) in combinations(by_tokens.items(), 2):
            share = Indel.normalized_similarity(mine, theirs, score_cutoff=SIMILAR)
            if share:
                found.append(Alike(round(share, 3), exercise, ", ".join(first + second)))
    return sorted(found, key=lambda each: (-each.share, *each[1:]))


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
