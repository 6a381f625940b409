"""A small preprocessor, and images for it."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.patience import PATIENCE_S
from vsched.errors import RequestRefused
from vsched.media import MediaReference
from vsched.media.pictures import processes
from vsched.types import ArraySpec, ModelInfo, Spans
from vsched.worker.contract import (
    Arrays,
    Companion,
    FrameSize,
    ImagePlan,
    ImageRecipe,
    ItemPlan,
    PixelBounds,
    Preprocessor,
    VideoFacts,
    VideoPlan,
    VideoSampling,
)
from vsched.worker.expansion import expand_images

PLACEHOLDER = 1
VIDEO_PLACEHOLDER = 2
FACTOR = 8
PATCH_VALUES = 48


def model_info(
    *,
    context_tokens: int = 1000,
    item_tokens_max: int = 64,
    dtype: str = "float32",
    embedding_levels: int = 1,
    video_token_id: int | None = None,
) -> ModelInfo:
    return ModelInfo(
        family="fake",
        path="",
        dtype=dtype,
        hidden_size=8,
        embedding_levels=embedding_levels,
        vocab_size=256,
        context_tokens=context_tokens,
        kv_bytes_per_token=64,
        item_tokens_max=item_tokens_max,
        image_token_id=PLACEHOLDER,
        video_token_id=video_token_id,
        stop_token_ids=(0,),
    )


def plan_of(grid: Sequence[int]) -> ImagePlan:
    """Plan of an image by its grid: two by two patches per token."""
    patches = math.prod(grid)
    spec = ArraySpec("pixels", "float32", (patches, PATCH_VALUES))
    return ImagePlan((spec,), patches // 4, metadata=repr(tuple(grid)).encode())


class FakeDetokenizer:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


class FakePreprocessor(Preprocessor):
    """One character per token, 8x8 pixels per token; pixels are the image's first value repeated.

    `gate` blocks processing, `entered` is set when it has started, `error` makes it fail.
    """

    settings_digest = b"fake settings"
    chat_template: str = "{{ tools }} <tool_call>"
    companion: Companion | None = Companion("grid_thw", ("time", "height", "width"))
    video_times = "timestamps"

    def __init__(self, info: ModelInfo | None = None) -> None:
        self.info = info or model_info()
        self.processed = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.rows_missing = 0

    @property
    def template_variables(self) -> frozenset[str]:
        return frozenset({"date_string"})

    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        parts: list[str] = [f"{name}={value};" for name, value in template_arguments.items()]
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if any(part.get("text") == "bad template" for part in content):
                raise RequestRefused("the template rejects this", code="template_error")
            parts.append(f"{message['role']}:")
            parts += [part["text"] if part["type"] == "text" else chr(1) for part in content]
        return "".join(parts)

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        del images
        return [ord(character) % 256 for character in text]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def detokenizer(self, *, special: bool = False) -> FakeDetokenizer:
        del special
        return FakeDetokenizer()

    def plan_image(self, width: int, height: int) -> ImagePlan:
        if max(width, height) > 200 * min(width, height):
            raise RequestRefused("the aspect ratio is over 200", code="image_aspect_ratio")
        rows, columns = -(-height // FACTOR) * 2, -(-width // FACTOR) * 2
        return plan_of((1, rows, columns))

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        if min(companion) < 1 or companion[1] % 2 or companion[2] % 2:
            raise RequestRefused(
                "no image has such a grid. Remedy: send its own", code="grid_thw_invalid"
            )
        return plan_of(companion)

    def plan_video(
        self, facts: VideoFacts, sampling: VideoSampling, *, frames_max: int, sample: bool = True
    ) -> VideoPlan:
        """Plan a group for each frame."""
        group = self.plan_image(facts.width, facts.height)
        group = replace(group, expansion=(50, *[VIDEO_PLACEHOLDER] * group.tokens))
        size = FrameSize(facts.width, facts.height)
        return VideoPlan(tuple(range(facts.frames)), size, (group,) * facts.frames)

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        [frame] = frames
        return self.process_image(frame)

    def plan_embedded_video(
        self, companion: Sequence[int], seconds: Sequence[float], *, frames_max: int
    ) -> VideoPlan:
        count, height, width = companion
        assert count <= frames_max
        group = plan_of((1, height, width))
        group = replace(group, expansion=(50, *[VIDEO_PLACEHOLDER] * group.tokens))
        groups = [replace(group, metadata=repr(each).encode()) for each in seconds]
        return VideoPlan((), FrameSize(0, 0), tuple(groups))

    def process_image(self, image: Image.Image) -> Arrays:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.processed += 1
        assert image.mode == "RGB"
        patches = self.plan_image(*image.size).tokens * 4 - self.rows_missing
        value = float(np.asarray(image)[0, 0, 0])
        return {"pixels": np.full((patches, PATCH_VALUES), value, np.float32)}

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[Spans]]:
        video = self.info.video_token_id
        return expand_images(token_ids, plans, placeholder=PLACEHOLDER, video=video)


class FaultyPreprocessor(FakePreprocessor):
    """Can be sent to picture processes, where some values of an image's first pixel are faults."""

    DIES, HANGS, RAISES = 201, 202, 203
    recipe = b"faulty"

    def image_recipe(self) -> ImageRecipe:
        return ImageRecipe(f"{__name__}:made_by_recipe", self.recipe)

    def process_image(self, image: Image.Image) -> Arrays:
        value = int(np.asarray(image)[0, 0, 0])
        if value == self.DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        while value == self.HANGS:
            signal.pause()
        if value == self.RAISES:
            raise OSError("out of luck")
        return super().process_image(image)


def hang(*_: object) -> None:
    while True:
        signal.pause()


def made_by_recipe(name: bytes) -> FaultyPreprocessor:
    if name == b"hanging":
        vars(processes)["inspect_video"] = hang
    return BoundedPreprocessor() if name == b"bounded" else FaultyPreprocessor()


class HangingPreprocessor(FaultyPreprocessor):
    """Picture processes hang when they inspect a video."""

    recipe = b"hanging"


class BoundedPreprocessor(FaultyPreprocessor):
    """Limits the tokens of an image by its pixel bounds, in one row."""

    recipe = b"bounded"

    def __init__(self, tokens_max: int = 64) -> None:
        super().__init__()
        self.tokens_max = tokens_max
        self.settings_digest = str(tokens_max).encode()

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> BoundedPreprocessor:
        if (bounds.max_pixels or 0) > pixels_max:
            raise RequestRefused("above the limit", code="pixel_bounds_invalid")
        return BoundedPreprocessor((bounds.max_pixels or 64) // FACTOR**2)

    def plan_image(self, width: int, height: int) -> ImagePlan:
        return plan_of((1, 2, 2 * min(super().plan_image(width, height).tokens, self.tokens_max)))


def image_bytes(
    width: int = 16, height: int = 8, *, value: int = 7, mode: str = "RGB", kind: str = "PNG"
) -> bytes:
    buffer = io.BytesIO()
    color = {"RGB": (value,) * 3, "RGBA": (value, value, value, 128)}.get(mode, value)
    Image.new(mode, (width, height), color).save(buffer, kind)
    return buffer.getvalue()


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


TensorParts = tuple[str, Sequence[int], bytes]
"""A tensor as in a safetensors file: dtype, shape, bytes."""


def tensor_of(array: npt.NDArray[Any], dtype: str = "") -> TensorParts:
    known = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32"}
    return dtype or known[array.dtype.name], array.shape, array.tobytes()


def tensors_file(tensors: Mapping[str, TensorParts], **metadata: str) -> bytes:
    """Write a safetensors file, in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return framed(json.dumps(header).encode(), data)


def framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def rows_of(tokens: int, width: int = 8, *, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, width), np.float32)


def embedding_file(
    rows: npt.NDArray[Any] | None = None,
    grid: Sequence[int] = (1, 2, 4),
    seconds: Sequence[float] = (),
    *,
    embeds: str = "",
) -> bytes:
    """Write rows (by default the two of the grid) and their grid; `embeds` names another dtype.

    Embeddings of a video have the time of each frame group.
    """
    tensors = {
        "embeds": tensor_of(rows_of(2) if rows is None else rows, embeds),
        "grid_thw": tensor_of(np.array(grid, np.int64)),
    }
    if seconds:
        tensors["timestamps"] = tensor_of(np.array(seconds))
    return tensors_file(tensors)


def embedded(file: bytes, *, is_video: bool = False) -> MediaReference:
    return MediaReference(base64.b64encode(file).decode(), is_video=is_video, is_embedded=True)
