"""Finding the request that takes its group down, without ending others for it.

After a loss, what ran there goes on together: most losses have other reasons. A request that ran in two losses is a
suspect. Suspects come back one at a time, each on probation until it has got past the place where it was; a group that
is lost meanwhile, or with nobody else running, has shown its culprit.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsched.kernel.request import RequestState

LOSSES_MAX = 2
"""A request that ran in so many losses is a suspect."""
PROBATION_STEPS = 2
"""Tokens beyond those that it had which a suspect must yield to be cleared."""


class Quarantine:
    """The suspect that a group runs, if any."""

    def __init__(self) -> None:
        self._state: RequestState | None = None

    def admits(self, state: RequestState) -> bool:
        """Return whether a request may join now."""
        return self._state is None or not is_suspect(state)

    def begin(self, state: RequestState) -> None:
        """A request joined."""
        if is_suspect(state):
            self._state = state

    def end(self, state: RequestState) -> None:
        """A request left its slot."""
        if self._state is state:
            self._state = None

    def review(self, done: int) -> None:
        """Clear the suspect once steps up to `done` have brought it far enough."""
        state = self._state
        if state is not None and 0 <= state.first_step <= done + 1 - PROBATION_STEPS:
            state.losses = 0
            self._state = None

    def blame(self, running: Sequence[RequestState]) -> RequestState | None:
        """Count a loss against those that ran, and return the culprit if it is certain."""
        alone = self._state or (running[0] if len(running) == 1 else None)
        self._state = None
        for state in running:
            state.losses += 1
        return alone if alone is not None and is_suspect(alone) else None


def is_suspect(state: RequestState) -> bool:
    """Return whether a request ran in too many losses to run beside another such."""
    return state.losses >= LOSSES_MAX
