"""Finding the poison request, which crashes its group, without ending others.

After a loss, all requests of the group run again, since most losses have other reasons. A request that ran in two
losses is a suspect. Suspects join one at a time, each in quarantine until it has yielded more tokens than before. If a
group is lost with a request in quarantine, or with a single running request, that request is the poison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsched.kernel.request import RequestState
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.probes import probe

LOSSES_MAX = 2
"""Losses after which a request is a suspect."""
QUARANTINE_TOKENS = 2
"""New tokens after which a suspect is cleared."""


class Quarantine(Restorable):
    """The running suspect of a group, if any.

    Attributes:
        number: Number of the suspect; 0 for none.
    """

    number: Saved[int] = 0

    def __init__(self, requests: Mapping[int, RequestState]) -> None:
        self._requests = requests

    def admits(self, state: RequestState) -> bool:
        """Return True if a request may join now."""
        return not self.number or not is_suspect(state)

    def begin(self, state: RequestState) -> None:
        """Note that a request joined."""
        if is_suspect(state):
            self.number = state.number

    def end(self, state: RequestState) -> None:
        """Note that a request left its slot."""
        if self.number == state.number:
            self.number = 0

    def review(self, done: int) -> None:
        """Clear the suspect once it got enough tokens in the steps up to `done`; there must be one."""
        state = self._requests[self.number]
        if 0 <= state.first_step <= done + 1 - QUARANTINE_TOKENS:
            probe("generate.suspect_cleared")
            state.losses = 0
            self.number = 0

    def blame(self, running: Sequence[RequestState]) -> RequestState | None:
        """Count a loss for each running request; return the poison request if it is certain."""
        alone = running[0] if len(running) == 1 else None
        if self.number:
            alone = self._requests[self.number]
        for state in running:
            state.losses += 1
        return alone if alone is not None and is_suspect(alone) else None


def is_suspect(state: RequestState) -> bool:
    """Return True if a request must not run together with another suspect."""
    return state.losses >= LOSSES_MAX
