"""Small images do not wait behind large ones."""

from __future__ import annotations

from vsched.policy import Dispatch, DispatchView, ImagePolicy, PositiveCount, Seconds


class SizeClasses(ImagePolicy, frozen=True, kw_only=True):
    """Keeps small and large images in separate batches; small ones go first, and one group is reserved for them.

    With at least two groups, a small image waits only for small ones; with one group, also for the
    running batch. A large image that has waited for `patience_s` goes before small ones. Images of
    a failed batch count as large.

    Attributes:
        small_tokens: Maximum encoder output tokens of a small image.
        patience_s: Time after which a large image is no longer overtaken by small ones.
    """

    small_tokens: PositiveCount = 512
    patience_s: Seconds = 2.0

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the group that delays the fewest requests, and the images of one class."""
        groups = view.groups
        small = [
            index
            for index, entry in enumerate(view.waiting)
            if entry.tokens is not None and entry.tokens <= self.small_tokens
        ]
        of_small = set(small)
        large = [index for index in range(len(view.waiting)) if index not in of_small]
        free = [index for index, group in enumerate(groups) if group.free]
        group = min(free, key=lambda index: groups[index].held_up)
        at_large = sum(1 for one in groups if not one.free and one.largest > self.small_tokens)
        room = at_large < max(len(groups) - 1, 1)
        waited_ns = view.now_ns - view.waiting[large[0]].arrived_ns if large else 0
        if large and room and (not small or waited_ns >= self.patience_s * 1e9):
            return Dispatch(group, large)
        return Dispatch(group if small else None, small)
