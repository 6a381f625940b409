"""Finding the poison request, which takes its group down, without ending others for it.

After a loss, what ran there goes on together: most losses have other reasons. A request that ran in two losses is a
suspect. Suspects come back one at a time, each in quarantine until it has got past the place where it was; when a
group is lost with a request in quarantine, or with nothing else running, that request is the poison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsched.kernel.request import RequestState
from vsched.kernel.snapshot import Restorable, Saved
from vsched.probes import probe

LOSSES_MAX = 2
"""A request that ran in this many losses is a suspect."""
QUARANTINE_TOKENS = 2
"""Tokens beyond those that it had which a suspect must yield to be cleared."""


class Quarantine(Restorable):
    """The suspect that a group runs, if any.

    Attributes:
        number: The suspect's; 0 for none.
    """

    number: Saved[int] = 0

    def __init__(self, requests: Mapping[int, RequestState]) -> None:
        self._requests = requests

    def admits(self, state: RequestState) -> bool:
        """Return whether a request may join now."""
        return not self.number or not is_suspect(state)

    def begin(self, state: RequestState) -> None:
        """A request joined."""
        if is_suspect(state):
            self.number = state.number

    def end(self, state: RequestState) -> None:
        """A request left its slot."""
        if self.number == state.number:
            self.number = 0

    def review(self, done: int) -> None:
        """Clear the suspect, of which there is one, once steps up to `done` have brought it far enough."""
        state = self._requests[self.number]
        if 0 <= state.first_step <= done + 1 - QUARANTINE_TOKENS:
            probe("generate.suspect_cleared")
            state.losses = 0
            self.number = 0

    def blame(self, running: Sequence[RequestState]) -> RequestState | None:
        """Count a loss against the requests that ran, and return the poison request if it is certain."""
        alone = running[0] if len(running) == 1 else None
        if self.number:
            alone = self._requests[self.number]
        for state in running:
            state.losses += 1
        return alone if alone is not None and is_suspect(alone) else None


def is_suspect(state: RequestState) -> bool:
    """Return whether a request ran in too many losses to run beside another such."""
    return state.losses >= LOSSES_MAX
