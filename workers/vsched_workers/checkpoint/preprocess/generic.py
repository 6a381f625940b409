"""Preprocessing of any architecture in transformers that takes images: in the engine, and in isolated image processes.

It consists of transformers' processor and the token limit of an image. Image processes build it from a recipe, with
only as much of the tokenizer as the processor needs.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import ArraySpec, ModelInfo, Spans
from vsched.worker.contract import (
    Arrays,
    FrameSize,
    ImagePlan,
    ImageRecipe,
    ItemPlan,
    PixelBounds,
    VideoFacts,
    VideoPlan,
    no_pixel_bounds,
)
from vsched_workers.checkpoint.facts import video_processor_of, video_settings
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.images import (
    ImageProcessor,
    ImageShape,
    forgo_torch,
    load_image_processor,
)
from vsched_workers.checkpoint.preprocess.base import (
    ImagePreprocessor,
    bare_images,
    check_sides,
    too_many_tokens,
)
from vsched_workers.checkpoint.preprocess.text import digest_of, is_video
from vsched_workers.checkpoint.preprocess.video_rules import (
    TIMESTAMPS,
    VideoLayout,
    VideoRules,
    embedded_frames_refused,
    video_rules,
)
from vsched_workers.checkpoint.tokenize import RenderedPrompt
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer
from vsched_workers.families.generic import (
    EMBEDDED_SIZE,
    VIDEO_GRID,
    embedded_size,
    pack_metadata,
    unpack_metadata,
)
from vsched_workers.families.qwen_image import (
    LEVELS,
    PIXELS,
    QwenImages,
    bounded_limits,
    image_plan,
)
from vsched_workers.families.video_processors import VideoProcessor

SIZES_KEPT = 256
"""The number of image sizes whose results are cached."""
SHAPES_KEPT = 16
BOUNDS_KEPT = 16
"""The number of cached processors for pixel bounds of requests."""
SHAPED = (224, 224)
"""The size of an image whose arrays show the number of their dimensions."""
SHRINK = 0.9
SHRINK_STEPS = 80
"""An image with too many tokens is shrunk by this factor until it fits, in at most this many steps."""


class GenericImages:
    """Processes images as transformers does, after shrinking images with too many tokens.

    All methods are thread-safe.
    """

    def __init__(
        self, processor: ImageProcessor, info: ModelInfo, videos: VideoRules | None = None
    ) -> None:
        """Take the processor of a checkpoint, and its rules for videos if it takes them."""
        self.processor = processor
        self.videos = videos
        self._info = info
        if videos is not None and videos.factor:
            self._patches = QwenImages(
                patch=int(videos.settings["patch_size"]),
                merge=int(videos.settings["merge_size"]),
                resample=int(videos.settings["resample"]),
                limits=videos.limits,
                levels=[],
                video_levels=videos.levels,
            )
        self._bounded = lru_cache(BOUNDS_KEPT)(self._bounded_by)
        self.shape = lru_cache(SHAPES_KEPT)(self._shape_of)
        self.fitting = lru_cache(SIZES_KEPT)(self._fit)

    def recipe(self) -> ImageRecipe:
        """Return the recipe for building it in another process."""
        return ImageRecipe(f"{__name__}:image_processing", msgspec.json.encode(self._info))

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> GenericImages:
        """Return the image processing with other bounds for resized images.

        Raises:
            RequestRefused: When the processor has no such bounds, or these are beyond its own.
        """
        return self._bounded(bounds, pixels_max)

    def _bounded_by(self, bounds: PixelBounds, pixels_max: int) -> GenericImages:
        area = self.processor.area
        if area is None:
            raise no_pixel_bounds()
        limits, side = area
        assert limits.maximum is not None
        tokens = limits.maximum // (side * side)
        found = bounded_limits(limits, bounds, tokens=tokens, factor=side, pixels_max=pixels_max)
        if found == limits:
            return self
        return GenericImages(self.processor.within(found), self._info, self.videos)

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, without its metadata.

        Raises:
            RequestRefused: When the image is empty, has an unsupported shape, or too many tokens.
        """
        check_sides(image.width, image.height)
        size = self.fitting(image.width, image.height)
        if image.mode != "RGB":
            image = image.convert("RGB")
        if image.size != size:
            image = image.resize(size, resample=Image.Resampling.BICUBIC)
        return self.processor.process(image)

    def plan_group(self, size: FrameSize) -> ImagePlan:
        """Return the plan of a frame group without its tokens, for frames that are resized to a size.

        Its metadata is its grid of patches, if it has one.
        """
        videos = self.videos
        assert videos is not None, "the model takes videos"
        channels = len(videos.levels)
        if videos.factor:
            patch, merge = self._patches.patch, self._patches.merge
            grid = (1, size.height // patch, size.width // patch)
            found = image_plan(
                grid, merge=merge, patch=patch, channels=channels, frames=videos.temporal
            )
            metadata = pack_metadata({VIDEO_GRID: np.array([grid], np.int64)})
            return dataclasses.replace(found, metadata=metadata)
        # As many dimensions as images of this model have.
        images = self.shape(*SHAPED).arrays.get(PIXELS, ("", (1, 1, 1, 1)))
        lead = (1,) * (len(images[1]) - 3)
        arrays = (
            ArraySpec(PIXELS, "uint8", (*lead, channels, size.height, size.width)),
            ArraySpec(LEVELS, "float32", (channels, 256)),
        )
        return ImagePlan(arrays, 0, metadata=pack_metadata({}))

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        """Return the pixels of a frame group, and the table of their values."""
        videos = self.videos
        assert videos is not None, "the model takes videos"
        if videos.factor:
            return self._patches.process_frames(frames, size)
        (frame,) = frames
        pixels = videos.resize_frame(frame).transpose(2, 0, 1)
        shape = self.plan_group(size).arrays[0].shape
        return {PIXELS: pixels.reshape(shape), LEVELS: np.array(videos.levels, np.float32)}

    def token_changes(self, before: Arrays, group: Arrays) -> npt.NDArray[np.float32]:
        """Return the mean difference of each token's bytes from those of the frame group before, 0 to 1."""
        return self._patches.token_changes(before, group)

    def _shape_of(self, width: int, height: int) -> ImageShape:
        try:
            return self.processor.shape(width, height)
        except (ValueError, ArithmeticError) as error:
            # The processor's message about an image without pixels concerns its size only.
            raise RequestRefused(
                f"an image of {width} x {height} pixels cannot be processed: {error} "
                "Remedy: crop or pad the image.",
                code="image_aspect_ratio",
            ) from error

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that an image is shrunk to, so that it has no more tokens than allowed.

        If the processor needs a blank image to determine its result, the size also respects the limit of its pixels.
        """
        limit, pixels_max = self._info.item_tokens_max, self.processor.pixels_max
        fewest = 0
        for step in range(SHRINK_STEPS):
            size = [max(1, round(side * SHRINK**step)) for side in (width, height)]
            if pixels_max is not None and size[0] * size[1] > pixels_max:
                continue
            tokens = self.shape(*size).text.count(self.processor.placeholder)
            if tokens <= limit:
                return size[0], size[1]
            fewest = min(tokens, fewest or tokens)
            if max(size) == 1:
                break
        raise too_many_tokens(width, height, fewest, limit)


def load_images(info: ModelInfo, tokenizer: Any) -> GenericImages:
    """Load the image processing; `tokenizer` is transformers' tokenizer of the checkpoint.

    Raises:
        CheckpointError: When the processor cannot be loaded.
    """
    directory = checkpoint_directory(info.path)
    processor = load_image_processor(directory, info.family, tokenizer, info.placeholder)
    videos = None
    described = video_processor_of(directory, info.family)
    if info.takes_videos and isinstance(described, VideoProcessor):
        videos = video_rules(described, video_settings(directory, described))
    return GenericImages(processor, info, videos)


def image_processing(settings: bytes) -> GenericImages:
    """Build the image processing of `GenericImages.recipe` in a process that forks, if possible without torch."""
    # The tokenizer's threads would exist when the process forks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    info = msgspec.json.decode(settings, type=ModelInfo)
    forgo_torch(checkpoint_directory(info.path))
    tokenizer = load_tokenizer(
        checkpoint_directory(info.path),
        vocab_size=info.vocab_size,
        chat_template=info.chat_template,
    )
    return load_images(info, tokenizer)


IMAGE_MARK, VIDEO_MARK = "\ufdd1", "\ufdd2"
"""Represent an image and a video in a message with string content; the marker itself could be a client's text."""

USUAL_SIZES = ((640, 480), (333, 333), (1500, 300))

PROCESS_RATIO, RESIZE_BYTES = 5, 12
"""Maximum memory of transformers' processors: bytes per byte of output, and per pixel of input."""


class AnyPreprocessor(ImagePreprocessor):
    """Tokenizer, chat template and image processor of any architecture that takes images."""

    companion = EMBEDDED_SIZE

    def __init__(self, info: ModelInfo, tokenizer: Any, images: GenericImages) -> None:
        super().__init__(info, tokenizer)
        self._use_images(images)
        processor = self.processor
        self._placeholder = processor.marker
        self._placeholders = (processor.marker,)
        self._marker: int = tokenizer.convert_tokens_to_ids(processor.marker)
        self._video_marker = processor.video_marker if self.info.takes_videos else ""
        # A marker that is no token is replaced in templates, and then by the one of an image.
        self._has_video_token = self.info.video_token_id not in {None, self._marker}
        if self._has_video_token:
            self._placeholders = (processor.marker, self._video_marker)
        self._added = frozenset(tokenizer.backend_tokenizer.get_added_tokens_decoder())
        self._bounded = lru_cache(BOUNDS_KEPT)(self._with)
        self._edges = ("", "")
        edges = {self._edges_of(processor.shape(*size).text) for size in USUAL_SIZES}
        if len(edges) == 1:  # otherwise they are tokenized with the image alone
            self._edges = edges.pop()
        self._takes_parts = self._renders([{"type": "image"}], processor.marker)
        self._takes_text = self._renders("vsched", "vsched")

    def _use_images(self, images: GenericImages) -> None:
        """Use this image processing."""
        self._images = images
        self.processor = images.processor
        self._videos = images.videos
        videos = images.videos.settings if images.videos is not None else None
        settings = json.dumps([self.processor.settings, videos], sort_keys=True, default=str)
        self.video_times = TIMESTAMPS if videos is not None else ""
        # The changes of patches are those of tokens.
        self.prunes_videos = images.videos is not None and bool(images.videos.factor)
        self.settings_digest = digest_of(
            b"vsched.arrays.1",
            self.info.family.encode(),
            version("transformers").encode(),
            settings.encode(),
            str(self.info.item_tokens_max).encode(),
        )
        self._plan = lru_cache(SIZES_KEPT)(self._plan_of)

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> Self:
        """Return the preprocessor with other bounds for resized images.

        Raises:
            RequestRefused: When the processor has no such bounds, or these are beyond its own.
        """
        images = self._images.bounded(bounds, pixels_max=pixels_max)
        if images is self._images:
            return self
        made: Self = self._bounded(images)  # type: ignore[assignment]  # the cache loses the type `Self`
        return made

    def _with(self, images: GenericImages) -> Self:
        made = copy.copy(self)
        made._use_images(images)  # noqa: SLF001 - its own
        return made

    def _renders(self, content: Any, wanted: str) -> bool:
        """Return whether the chat template's output for a message with this content contains `wanted`."""
        try:
            text = self._rendered([{"role": "user", "content": content}])
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
        return wanted in text

    def _edges_of(self, text: str) -> tuple[str, str]:
        """Return the plain text at the beginning and the end of an image's placeholder text.

        It is tokenized together with the surrounding text, since tokens may span both, such as several line breaks.
        """
        backend = self._tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        encoded = backend.encode(text, add_special_tokens=False)
        places = [
            offsets
            for token, offsets in zip(encoded.ids, encoded.offsets, strict=True)
            if token in added
        ]
        return text[: places[0][0]], text[places[-1][1] :]

    def _with_edges(self, text: str) -> str:
        before, after = self._edges
        if before or after:
            text = text.replace(self._placeholder, f"{before}{self._placeholder}{after}")
        text = text.replace(IMAGE_MARK, f"{before}{self._placeholder}{after}")
        video = self._video_marker if self._has_video_token else self._placeholder
        return text.replace(VIDEO_MARK, video)

    def _videos_in(self, rendered: str) -> int:
        """Return the number of videos in a rendered template."""
        marks = rendered.count(VIDEO_MARK)
        return marks + (rendered.count(self._video_marker) if self._has_video_token else 0)

    def _template_for(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        """Return the template for messages; a processor may have one of its own for messages with videos."""
        template = super()._template_for(messages, tools)
        contents = (message.get("content") for message in messages)
        if any(
            map(is_video, itertools.chain(*(each for each in contents if isinstance(each, list))))
        ):
            template = self.processor.video_template or template
        if self._video_marker and not self._has_video_token:
            template = template.replace(self._video_marker, VIDEO_MARK)
        return template

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each image by a bare part, or by its marker if the template does not support parts."""
        content = message.get("content")
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
            return {**message, "content": content if self._takes_text else parts}
        if not isinstance(content, list):
            return dict(message)
        parts = bare_images(content)
        if self._takes_parts:
            return {**message, "content": parts}
        marks = {"image": IMAGE_MARK, "video": VIDEO_MARK}
        lines = [marks.get(str(part.get("type")), part.get("text", "")) for part in parts]
        return {**message, "content": "\n".join(lines)}

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return the plan of an image of this size.

        Raises:
            RequestRefused: When the image is empty, has an unsupported shape, or too many tokens.
        """
        check_sides(width, height)
        size = self._images.fitting(width, height)
        plan = self._plan(*size)
        if size == (width, height):
            return plan
        # Resizing creates an intermediate image of the old height and the new width.
        resize_bytes = 4 * size[0] * (height + size[1])
        return dataclasses.replace(plan, work_bytes=plan.work_bytes + resize_bytes)

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of an image by its height and width; raises as `plan_image`."""
        return self.plan_image(*embedded_size(companion))

    def _plan_of(self, width: int, height: int) -> ImagePlan:
        shape = self._images.shape(width, height)
        arrays = tuple(ArraySpec(name, *each) for name, each in sorted(shape.arrays.items()))
        before, after = self._edges
        text = shape.text.removeprefix(before).removesuffix(after)
        ids = tuple(self._special.ids(RenderedPrompt(text)))
        tokens = ids.count(self.info.placeholder)
        made = sum(spec.nbytes for spec in arrays)
        return ImagePlan(
            arrays=arrays,
            tokens=tokens,
            expansion=ids if len(ids) > tokens or self._marker != self.info.placeholder else (),
            metadata=pack_metadata(shape.small),
            work_bytes=PROCESS_RATIO * made + RESIZE_BYTES * width * height,
        )

    def _plan_layout(self, videos: VideoRules, facts: VideoFacts, layout: VideoLayout) -> VideoPlan:
        size = layout.size
        groups, row_token = self._groups(videos, size, layout.seconds, layout.duration)
        made = sum(spec.nbytes for spec in groups[0].arrays)
        steps = () if videos.factor else videos.steps(facts.width, facts.height)
        sides = [
            (facts.width, facts.height),
            *((each.width, each.height) for each in steps),
            (size.width, size.height),
        ]
        resizes = (
            4 * after[0] * (before[1] + after[1]) for before, after in itertools.pairwise(sides)
        )
        side = videos.factor
        return VideoPlan(
            layout.frames,
            size,
            groups,
            work_bytes=4 * made + sum(resizes),
            grid=(size.height // side, size.width // side) if side else (0, 0),
            row_token=row_token,
        )

    def plan_embedded_video(
        self, companion: Sequence[int], seconds: Sequence[float], *, frames_max: int
    ) -> VideoPlan:
        """Return the plan of a video by height and width of its frames, and the time of each sampled frame.

        Raises:
            RequestRefused: When there is no such video.
        """
        videos = self._videos
        if videos is None:
            return super().plan_embedded_video(companion, seconds, frames_max=frames_max)
        count = len(seconds)
        if not 0 < count <= frames_max:
            raise embedded_frames_refused(f"{count} frames", frames_max)
        width, height = embedded_size(companion)
        check_sides(width, height)
        size = videos.size(width, height, count, self.info.item_tokens_max)
        # As for frames at a constant rate.
        duration = count * (max(seconds) - min(seconds)) / max(count - 1, 1)
        groups, row_token = self._groups(videos, size, seconds, duration)
        return VideoPlan((), size, groups, row_token=row_token)

    def _groups(
        self, videos: VideoRules, size: FrameSize, seconds: Sequence[float], duration: float
    ) -> tuple[tuple[ImagePlan, ...], int]:
        """Return the plan of each frame group of a video, and the token of its rows.

        `seconds` are the times of its sampled frames.
        """
        count = -(-len(seconds) // videos.temporal)
        group = self._images.plan_group(size)
        grid = unpack_metadata(group.metadata).get(VIDEO_GRID)
        grids = () if grid is None else (count, *grid[0, 1:])
        text = self.processor.video_text(seconds, duration, size, grids, videos.settings)
        ids = tuple(self._special.ids(RenderedPrompt(text)))
        video = self.info.video_token_id
        row_token = video if video in ids and video is not None else self.info.placeholder
        # Rows that belong to no group follow the last one.
        tokens, more = divmod(ids.count(row_token), count)
        if tokens + more > self.info.item_tokens_max:
            raise too_many_tokens(size.width, size.height, tokens + more, self.info.item_tokens_max)
        rows = [at for at, token in enumerate(ids) if token == row_token]
        ends = [rows[index * tokens - 1] + 1 for index in range(1, count)]
        groups = [
            dataclasses.replace(group, tokens=tokens, expansion=ids[start:stop])
            for start, stop in itertools.pairwise([0, *ends, len(ids)])
        ]
        groups[-1] = dataclasses.replace(groups[-1], tokens=tokens + more)
        return tuple(groups), row_token

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[Spans]]:
        """See `ImagePreprocessor.expand`."""
        if any(isinstance(plan, VideoPlan) for plan in plans):
            token_ids, plans = self._with_video_edges(token_ids, plans)
        return super().expand(token_ids, plans)

    def _keeps_apart(self, plans: Sequence[ItemPlan]) -> bool:
        return any(
            name.endswith("_thw")
            for plan in plans
            if isinstance(plan, ImagePlan)
            for name in unpack_metadata(plan.metadata)
        )

    def _with_video_edges(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[ItemPlan]]:
        """Tokenize the plain text at the ends of each video's expansion together with the text around the video.

        That text depends on the video, so the prompt was tokenized without it.
        """
        ids, made = list(token_ids), list(plans)
        markers = {self._marker, self.info.video_token_id}
        places = [place for place, token in enumerate(ids) if token in markers]
        for place, index in reversed([*zip(places, range(len(plans)), strict=False)]):
            plan = plans[index]
            if not isinstance(plan, VideoPlan):
                continue
            texts = [list(group.expansion) for group in plan.groups]
            leading, trailing = (
                _ordinary(texts[0], self._added),
                _ordinary(texts[-1][::-1], self._added),
            )
            before_text, after_text = texts[0][:leading], texts[-1][len(texts[-1]) - trailing :]
            start = next((at for at in range(place, 0, -1) if ids[at - 1] in self._added), 0)
            stop = next(
                (at for at in range(place + 1, len(ids)) if ids[at] in self._added), len(ids)
            )
            before = self._joined(ids[start:place], before_text)
            after = self._joined(after_text, ids[place + 1 : stop])
            ids[start:stop] = [*before, ids[place], *after]
            texts[-1] = texts[-1][: len(texts[-1]) - trailing]
            texts[0] = texts[0][leading:]
            groups = zip(plan.groups, texts, strict=True)
            made[index] = dataclasses.replace(
                plan,
                groups=tuple(
                    dataclasses.replace(group, expansion=tuple(text)) for group, text in groups
                ),
            )
        return ids, made

    def _joined(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Return the tokens of two texts, given by their tokens, as one text."""
        separate = [*one, *other]
        if not (one and other):
            return separate
        texts = [
            b"".join(map(self.token_bytes, each)).decode(errors="replace") for each in (one, other)
        ]
        if [*map(self._special.ids_of_text, texts)] != [list(one), list(other)]:
            return separate  # such as a tokenizer that begins each text with a blank
        return self._special.ids_of_text("".join(texts))


def _ordinary(token_ids: Sequence[int], added: Collection[int]) -> int:
    """Return the number of tokens before the first added token; 0 if there is none."""
    return next((at for at, token in enumerate(token_ids) if token in added), 0)
