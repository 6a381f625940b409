"""Base of the preprocessing of models that take images."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import Spans
from vsched.worker.contract import (
    Arrays,
    FrameSize,
    ImageRecipe,
    ItemPlan,
    VideoFacts,
    VideoPlan,
    VideoSampling,
)
from vsched.worker.expansion import expand_images, places_of
from vsched_workers.checkpoint.preprocess.text import TextPreprocessor
from vsched_workers.checkpoint.preprocess.video_rules import VideoLayout, VideoRules


class ImagePreprocessor(TextPreprocessor):
    """Preprocessing with images, which `_images` processes, here or built from its recipe in another process.

    Attributes:
        _marker: The token of one image in a prompt before its expansion.
        _videos: The rules for videos; None if the model takes none.
    """

    _images: Any
    _marker: int
    _videos: VideoRules | None

    def image_recipe(self) -> ImageRecipe:
        """Return the recipe for building the image processor in another process, without torch."""
        recipe: ImageRecipe = self._images.recipe()
        return recipe

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, without its metadata."""
        arrays: Arrays = self._images.process_image(image)
        return arrays

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        """Return the pixels of a frame group, and the table of their values."""
        arrays: Arrays = self._images.process_frames(frames, size)
        return arrays

    def token_changes(self, before: Arrays, group: Arrays) -> npt.NDArray[np.float32]:
        """Return the mean difference of each token's bytes from those of the frame group before, 0 to 1."""
        changes: npt.NDArray[np.float32] = self._images.token_changes(before, group)
        return changes

    def plan_video(
        self, facts: VideoFacts, sampling: VideoSampling, *, frames_max: int, sample: bool = True
    ) -> VideoPlan:
        """Return the plan of a video, with the text around its frame groups, or times in their metadata."""
        if self._videos is None:
            return super().plan_video(facts, sampling, frames_max=frames_max, sample=sample)
        check_sides(facts.width, facts.height)
        tokens = self.info.item_tokens_max
        layout = self._videos.layout(
            facts, sampling, frames_max=frames_max, sample=sample, tokens=tokens
        )
        return self._plan_layout(self._videos, facts, layout)

    @abstractmethod
    def _plan_layout(self, videos: VideoRules, facts: VideoFacts, layout: VideoLayout) -> VideoPlan:
        """Return the plan of a video whose frames were chosen."""

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th marker according to `plans[i]`; return the ids, and each item's placeholders.

        Raises:
            RequestRefused: When the numbers of markers and images differ, or two images touch whose positions follow
                from their boundaries.
        """
        has_video = any(isinstance(plan, VideoPlan) for plan in plans)
        video = self.info.video_token_id if has_video else None
        expanded = expand_images(
            token_ids, plans, placeholder=self.info.placeholder, marker=self._marker, video=video
        )
        apart = [self._marker] if self._keeps_apart(plans) else []
        if any(_touch(token_ids, each) for each in (*apart, video) if each is not None):
            raise RequestRefused(
                "two image placeholders stand side by side. "
                "Remedy: separate them as the chat template does.",
                code="image_placeholders_touch",
            )
        return expanded

    def _keeps_apart(self, plans: Sequence[ItemPlan]) -> bool:
        """Return whether positions follow from the boundaries of images."""
        del plans
        return True


def bare_images(parts: Sequence[Any]) -> list[Any]:
    """Replace each image by a bare part, so that no image data passes through the template engine."""
    return [
        {"type": "image"}
        if isinstance(part, Mapping) and part.get("type") in {"image", "image_url"}
        else part
        for part in parts
    ]


def check_sides(width: int, height: int) -> None:
    """Check that an image has pixels."""
    if width < 1 or height < 1:
        raise RequestRefused.of_limit(
            "an image side is empty",
            value=min(width, height),
            limit=1,
            remedy="send an image with pixels",
            code="image_empty",
        )


def too_many_tokens(width: int, height: int, tokens: int, limit: int) -> RequestRefused:
    """Return the error that an image has too many tokens."""
    return RequestRefused.of_limit(
        f"an image of {width} x {height} pixels has too many tokens",
        value=tokens,
        limit=limit,
        remedy="send an image with a lower aspect ratio, or raise the token budget of one image",
        code="image_tokens_exceeded",
    )


def _touch(token_ids: Sequence[int], marker: int) -> bool:
    """Return whether two markers are adjacent."""
    places = places_of(token_ids, marker)
    return any(next_one == one + 1 for one, next_one in itertools.pairwise(places))
