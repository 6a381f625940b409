"""Encode where the load is lowest."""

from __future__ import annotations

from vsched.policy import Dispatch, DispatchView, ImagePolicy


class LeastLoadedGroup(ImagePolicy, frozen=True, kw_only=True):
    """Gives the next batch to the free group whose processes serve the fewest tokens, prompts included.

    Ties, as between groups with their own processes, go to the group that has encoded the fewest
    tokens: all groups share the work, whereas with `fewest-held-up` the last ones idle.
    """

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the group, and all images in waiting order."""
        groups = view.groups
        free = [index for index, group in enumerate(groups) if group.free]
        return Dispatch(
            min(free, key=lambda index: (groups[index].load_tokens, groups[index].tokens_encoded))
        )
