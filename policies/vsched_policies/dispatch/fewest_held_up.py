"""Encode where the fewest requests decode."""

from __future__ import annotations

from vsched.policy import Dispatch, DispatchPolicy, DispatchView


class FewestHeldUp(DispatchPolicy, frozen=True, kw_only=True):
    """Gives the next batch to the free group that keeps the fewest requests from their next tokens.

    Groups with processes of their own keep nobody: the first of those that are free has it.
    """

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the group, and all images as they wait."""
        free = [index for index, group in enumerate(view.groups) if group.free]
        return Dispatch(min(free, key=lambda index: view.groups[index].held_up))
