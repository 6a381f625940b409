"""Everybody comes in, up to the bounds of the server."""

from __future__ import annotations

from vsched.policy import FrontDoorAnswer, FrontDoorPolicy, FrontDoorView, LetIn


class Open(FrontDoorPolicy, frozen=True, kw_only=True):
    """Lets every request in; the bounds of preparation and of the waiting queue refuse what is too much."""

    def receive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return `LetIn`."""
        return LetIn()
