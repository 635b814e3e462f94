"""Pieces of keys on their way from one server to another, where servers have copies.

The copy that answers for a server sends them; but it may die, and so may the head that they were
sent to. So each copy keeps them until it is certain that they are there, and when the copies of
either server change they are sent again. They carry a number: what comes twice counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.ps.mail import Mail
from dtlab.ps.policy import Policy
from dtlab.ps.replication import View

_BEFORE_ALL_IS_THERE = ("move", "pieces", "lose")


class Handover:
    """One copy's part in it. `sent`: server → what it is given."""

    def __init__(self, mail: Mail, policy: Policy, shard: int):
        self._mail = mail
        self._views = {server: View(0, copies) for server, copies in policy.copies.items()
                       if server != shard}
        self.sent: dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]] = {}

    def send(self, server: int) -> None:
        """What `server` is given, to its head."""
        body, wires = self.sent[server]
        self._mail.send(self._views[server].head, body, wires)

    def change(self, server: int, view: View, answers: bool) -> None:
        """Another server's live copies have been announced. `answers`: is it me who sends?"""
        if view.epoch > self._views[server].epoch:
            self._views[server] = view
            if answers and server in self.sent:
                self.send(server)

    def send_again(self) -> None:
        """It is me who sends, now."""
        for server in self.sent:
            self.send(server)

    def goes_on(self, what: str) -> None:
        """A worker's request is carried out. Once one asks for anything else, all servers have
        answered it that they have all their pieces."""
        if what not in _BEFORE_ALL_IS_THERE:
            self.sent.clear()
