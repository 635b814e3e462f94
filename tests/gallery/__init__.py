"""Attacks on the grader: answers and notebooks that want points, secrets or harm.

`dtlab grade --attack` hands each of them in, then an honest notebook, and says what came of it: no
attack may earn a point, leave anything behind, or change the next grade.
"""

from __future__ import annotations

from tests.gallery import (
    channels,
    endings,
    guesses,
    harnesses,
    inspection,
    lazy,
    notebooks,
    omissions,
    patches,
    shortcuts,
    siblings,
    values,
)
from tests.gallery.attack import Attack

ATTACKS: tuple[Attack, ...] = (*values.ATTACKS, *patches.ATTACKS, *inspection.ATTACKS,
                               *endings.ATTACKS, *channels.ATTACKS, *notebooks.ATTACKS,
                               *shortcuts.ATTACKS, *harnesses.ATTACKS,
                               *guesses.ATTACKS, *siblings.ATTACKS, *omissions.ATTACKS,
                               *lazy.ATTACKS)

__all__ = ["ATTACKS", "Attack"]
