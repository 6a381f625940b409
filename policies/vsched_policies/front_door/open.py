"""Admit every request, within the limits of the server."""

from __future__ import annotations

from vsched.policy import Admit, ArrivalDecision, ArrivalView, RequestPolicy


class Open(RequestPolicy, frozen=True, kw_only=True):
    """Admits every request; the limits of preparation and of the waiting queue refuse any excess."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        """Return `Admit`."""
        return Admit()
