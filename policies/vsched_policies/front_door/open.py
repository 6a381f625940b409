"""Admit every request, within the limits of the server."""

from __future__ import annotations

from vsched.policy import FrontDoorAnswer, FrontDoorPolicy, FrontDoorView, LetIn


class Open(FrontDoorPolicy, frozen=True, kw_only=True):
    """Admits every request; the limits of preparation and of the waiting queue refuse any excess."""

    def receive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return `LetIn`."""
        return LetIn()
