"""Encode where there is the least work."""

from __future__ import annotations

from vsched.policy import Dispatch, DispatchPolicy, DispatchView


class LeastLoadedGroup(DispatchPolicy, frozen=True, kw_only=True):
    """Gives the next batch to the free group whose processes serve the fewest tokens, prompts included.

    Among equals, as where groups have processes of their own, the one that was given the least to encode so far has it:
    all work alike, where with `fewest-held-up` the last ones idle.
    """

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the group, and all images as they wait."""
        groups = view.groups
        free = [index for index, group in enumerate(groups) if group.free]
        return Dispatch(
            min(free, key=lambda index: (groups[index].load_tokens, groups[index].tokens_encoded))
        )
