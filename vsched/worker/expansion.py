"""Expansion of the placeholders of images and videos in a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import groupby

from vsched.errors import RequestRefused
from vsched.types import Spans
from vsched.worker.contract import ItemPlan, VideoPlan


def expand_images(
    token_ids: Sequence[int],
    plans: Sequence[ItemPlan],
    *,
    placeholder: int,
    marker: int | None = None,
    video: int | None = None,
) -> tuple[list[int], list[Spans]]:
    """Replace the i-th marker by the expansion of the i-th image or video.

    Return the ids, and the placeholder spans of each image and of each frame group of a video that has any.

    `marker` is the token for an image in the unexpanded prompt, by default `placeholder`; `video` is that for a video,
    if the model takes videos. It may be the same one.

    Raises:
        RequestRefused: When the numbers of placeholders and images differ, or their order.
    """
    marker = placeholder if marker is None else marker
    places = places_of(token_ids, marker)
    if video is not None and video != marker:
        places = sorted(places + places_of(token_ids, video))
    if len(places) != len(plans):
        raise RequestRefused.of_limit(
            "the prompt's image placeholders and the request's images differ in number",
            value=len(places),
            limit=len(plans),
            remedy="send one placeholder an image or video, and none in the text",
            code="image_count_mismatch",
        )
    expanded: list[int] = []
    spans: list[Spans] = []
    start = 0
    for place, plan in zip(places, plans, strict=True):
        expanded.extend(token_ids[start:place])
        start = place + 1
        if video != marker and isinstance(plan, VideoPlan) != (token_ids[place] == video):
            raise RequestRefused(
                "the prompt's placeholders and the request's images and videos differ in order. "
                "Remedy: send a placeholder of an image for an image, and of a video for a video.",
                code="image_count_mismatch",
            )
        groups = plan.groups if isinstance(plan, VideoPlan) else (plan,)
        token = placeholder
        if isinstance(plan, VideoPlan):
            token = token_ids[place] if plan.row_token is None else plan.row_token
        for one in groups:
            if not one.placeholders:
                expanded.extend(one.expansion)
                continue
            first = len(expanded)
            if one.expansion:
                expanded.extend(one.expansion)
                spans.append(runs_of(one.expansion, token, first))
            else:
                expanded.extend([token] * one.placeholders)
                spans.append(((first, len(expanded)),))
    expanded.extend(token_ids[start:])
    return expanded, spans


def places_of(token_ids: Sequence[int], marker: int) -> list[int]:
    """Return the positions of a token, without a Python loop over all tokens."""
    places: list[int] = []
    place = -1
    with contextlib.suppress(ValueError):
        while True:
            place = token_ids.index(marker, place + 1)
            places.append(place)
    return places


def runs_of(expansion: Sequence[int], placeholder: int, first: int) -> Spans:
    """Return the placeholder spans of an expansion that begins at position `first`."""
    runs: list[tuple[int, int]] = []
    for is_placeholder, run in groupby(expansion, key=placeholder.__eq__):
        stop = first + sum(1 for _ in run)
        if is_placeholder:
            runs.append((first, stop))
        first = stop
    return tuple(runs)
