"""Dispatch policies: the encode group of the next batch."""

from __future__ import annotations

from vsched.policy import Dispatch, DispatchView, ImagePolicy


class FewestHeldUp(ImagePolicy, frozen=True, kw_only=True):
    """Gives the next batch to the free group that delays the fewest decoding requests.

    Groups with their own processes delay none: the first free one gets the batch.
    """

    def dispatch(self, view: DispatchView) -> Dispatch:
        return super().dispatch(view)
