"""The front end of a checkpoint: chat template, tokenizer, image processor.

Tokenizer and image processor are loaded apart. The combined processor of transformers would pull in the video processor
and with it torchvision; its placeholders are expanded here instead.

The image processor of transformers is asked once, at load, for its settings and for what it makes of each of the 256
values of each channel. Processing an image is then a resize by Pillow, a look-up and a transposition: the same numbers
to the bit, without the float64 intermediate of eight times the image's size, and without torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import CheckpointError, RequestRefused, limit_message
from vsched.types import ModelInfo, Spans
from vsched.worker.contract import Arrays, Companion, ImagePlan
from vsched.worker.expansion import expand_images
from vsched_workers.checkpoint.detokenize import ByteDetokenizer, TokenTable
from vsched_workers.checkpoint.facts import image_limits, processor_settings
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.special_tokens import SpecialTokens
from vsched_workers.checkpoint.tokenizer_files import load_part, load_tokenizer
from vsched_workers.families import family_of
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    PIXELS,
    ResizeLimits,
    clamp_settings,
    grid_of,
    image_plan,
    resized,
)

IMAGE_PROCESSOR = "Qwen2VLImageProcessorPil"
"""The class of transformers for all these families, whatever older checkpoints call it."""


class TextPreprocessor:
    """Tokenizer and chat template of one checkpoint; it refuses images.

    Every method may be called from any thread: nothing is changed after loading.
    """

    settings_digest = b""
    companion: Companion | None = None
    _placeholder = ""

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        self.info = info
        self._tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        self._table = TokenTable.of_tokenizer(backend)
        self._special = SpecialTokens(backend, self._table.raw, info.context_tokens)

    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        """Render OpenAI-shaped messages with the chat template, one placeholder an image.

        Special tokens in the messages are text, which `tokenize` knows from the value that this returns.

        Raises:
            RequestRefused: When the template rejects the messages, there is none, or their text cannot fit the context.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestRefused(
                "this model has no chat template. "
                "Remedy: send a prompt to /v1/completions, or serve it with model.chat_template.",
                code="chat_template_missing",
            )
        self._special.check_size(*_texts(messages))
        mark = self._special.mark
        arguments = {"add_generation_prompt": True, **mark(template_arguments)}
        try:
            rendered = self._tokenizer.apply_chat_template(
                [mark(self._for_template(message)) for message in messages],
                tokenize=False,
                **arguments,
            )
        except TemplateError as error:
            raise RequestRefused(
                f"the chat template rejects the messages: {error}", code="invalid_messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestRefused(
                "the messages do not have the form that the chat template expects",
                code="invalid_messages",
            ) from error
        return self._special.unmark(str(rendered))

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; other threads run meanwhile.

        A text that no template made begins with the tokenizer's first tokens, such as `<s>`.
        Special tokens are recognised but for those in messages. Without `images` the image placeholder is text.

        Raises:
            RequestRefused: When they exceed the context, or a stretch of text cannot be divided.
        """
        return self._special.ids(text, plain="" if images else self._placeholder)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens skipped."""
        return self._table.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self._table.bytes_of(token_id)

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh incremental detokenizer for one request."""
        return ByteDetokenizer(self._table)

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose content is one string: templates of such models know no parts."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        return {**message, "content": "\n".join(part.get("text", "") for part in content)}

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Refuse an image."""
        raise self._refusal()

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Refuse an image."""
        raise self._refusal()

    def process_image(self, image: Image.Image) -> Arrays:
        """Refuse an image."""
        raise self._refusal()

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Return the ids, in which nothing stands for an image.

        Raises:
            RequestRefused: When there are images.
        """
        if plans:
            raise self._refusal()
        return list(token_ids), []

    def _refusal(self) -> RequestRefused:
        return RequestRefused(
            "the model takes no images. Remedy: send text alone.", code="images_not_taken"
        )


class QwenPreprocessor(TextPreprocessor):
    """Tokenizer, chat template and image processor of one checkpoint."""

    companion = Companion("grid_thw", ("time", "height", "width in patches"))

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Any,
        settings: Mapping[str, Any],
        limits: ResizeLimits,
        levels: npt.NDArray[np.float32],
    ) -> None:
        super().__init__(info, tokenizer)
        self._placeholder = tokenizer.backend_tokenizer.id_to_token(info.placeholder) or ""
        self._limits = limits
        self._patch = int(settings["patch_size"])
        self._merge = int(settings["merge_size"])
        self._temporal = int(settings["temporal_patch_size"])
        self._resample = Image.Resampling(int(settings["resample"]))
        self._levels = levels
        self.settings_digest = _digest(info, settings, limits)

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each image by a bare marker, so that no image data runs through the template engine."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        parts = [
            {"type": "image"}
            if isinstance(part, Mapping) and part.get("type") in {"image", "image_url"}
            else part
            for part in content
        ]
        return {**message, "content": parts}

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return what an image of this size becomes; its metadata is its grid.

        Raises:
            RequestRefused: When the image is empty, too thin, or would have more tokens than allowed.
        """
        rows, columns = self._resized(width, height)
        # Resizing goes through an image of the old height and the new width.
        plan = self._plan(
            (1, rows // self._patch, columns // self._patch),
            work_bytes=4 * columns * (height + rows),
        )
        if plan.tokens > self.info.item_tokens_max:
            raise RequestRefused(
                limit_message(
                    f"an image of {width} x {height} pixels has too many tokens",
                    value=plan.tokens,
                    limit=self.info.item_tokens_max,
                    remedy="send an image that is less thin, or raise the token budget of one image",
                ),
                code="image_tokens_exceeded",
            )
        return plan

    def _plan(self, grid: tuple[int, int, int], work_bytes: int = 0) -> ImagePlan:
        channels = len(self._levels)
        return image_plan(
            grid,
            merge=self._merge,
            patch_values=channels * self._temporal * self._patch * self._patch,
            work_bytes=work_bytes,
        )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if width < 1 or height < 1:
            raise RequestRefused(
                limit_message(
                    "an image side is empty",
                    value=min(width, height),
                    limit=1,
                    remedy="send an image with pixels",
                ),
                code="image_empty",
            )
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter > ASPECT_RATIO_MAX:
            raise RequestRefused(
                limit_message(
                    f"an image of {width} x {height} pixels is too thin (longer over shorter side)",
                    value=round(longer / shorter, 1),
                    limit=ASPECT_RATIO_MAX,
                    remedy="crop or pad the image",
                ),
                code="image_aspect_ratio",
            )
        factor = self._patch * self._merge
        return resized(height, width, factor=factor, limits=self._limits)

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of a grid: patches in time, height and width.

        Raises:
            RequestRefused: When a side is empty or does not come out in whole merge units.
        """
        time, height, width = grid = companion
        merge = self._merge
        if min(grid) < 1 or height % merge or width % merge:
            raise RequestRefused(
                limit_message(
                    "no image has such a grid",
                    value=list(grid),
                    limit=f"at least [1, {merge}, {merge}], height and width multiples of {merge}",
                    remedy="send the image_grid_thw that the checkpoint's image processor gives",
                ),
                code="grid_thw_invalid",
            )
        return self._plan((time, height, width))

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the pixels of an RGB image, float32 [t*h*w, patch values], with the grid of `plan_image`.

        Raises:
            RequestRefused: As `plan_image`.
        """
        _, rows, columns = grid_of(self.plan_image(image.width, image.height).metadata)
        if image.mode != "RGB":
            image = image.convert("RGB")
        size = (columns * self._patch, rows * self._patch)
        pixels = np.asarray(image.resize(size, resample=self._resample))
        return {PIXELS: self._patches(pixels, rows, columns)}

    def _patches(
        self, pixels: npt.NDArray[np.uint8], rows: int, columns: int
    ) -> npt.NDArray[np.float32]:
        """Cut [height, width, channels] into patches, merge units together, channels first within a patch."""
        patch, merge, temporal = self._patch, self._merge, self._temporal
        channels = pixels.shape[2]
        cut = pixels.reshape(
            rows // merge, merge, patch, columns // merge, merge, patch, channels
        ).transpose(0, 3, 1, 4, 6, 2, 5)
        count = rows * columns
        cut = np.ascontiguousarray(cut).reshape(count, channels, patch * patch)
        first = np.arange(channels, dtype=np.uint16)[:, None] * 256
        values = self._levels.reshape(-1).take(cut + first, mode="clip")
        out = np.empty((count, channels, temporal, patch * patch), dtype=np.float32)
        out[:] = values[:, :, None]
        return out.reshape(count, channels * temporal * patch * patch)

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th image placeholder as `plans[i]` says; return the ids, and each image's placeholders.

        Raises:
            RequestRefused: When placeholders and images differ in number, or two images touch.
        """
        placeholder = self.info.placeholder
        expanded = expand_images(token_ids, plans, placeholder=placeholder)
        if any(one == next_one == placeholder for one, next_one in itertools.pairwise(token_ids)):
            raise RequestRefused(
                "two image placeholders stand side by side. Remedy: separate them as the chat template does.",
                code="image_placeholders_touch",
            )
        return expanded


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _digest(info: ModelInfo, settings: Mapping[str, Any], limits: ResizeLimits) -> bytes:
    """Digest what the pixels depend on besides the image: equal in every process and on every host."""
    parts = (
        b"vsched.pixels.1",
        info.family.encode(),
        json.dumps(settings, sort_keys=True, default=str).encode(),
        f"{limits.minimum} {limits.maximum}".encode(),
    )
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def load_preprocessor(info: ModelInfo) -> TextPreprocessor:
    """Load tokenizer, template and, where images are taken, image processor, clamped to `info.item_tokens_max`.

    Raises:
        CheckpointError: When tokenizer or processor are missing or cannot be loaded.
    """
    directory = checkpoint_directory(info.path)
    tokenizer = load_tokenizer(
        directory, vocab_size=info.vocab_size, chat_template=info.chat_template
    )
    if not info.takes_images:
        return TextPreprocessor(info, tokenizer)
    config = read_json(directory, "config.json")
    family = family_of(config)
    limits = image_limits(family, config, processor_settings(directory), info.item_tokens_max)
    processor = load_part(IMAGE_PROCESSOR, directory, "image processor")
    settings = processor.to_dict()
    patch = int(family.vision(config, "patch_size"))
    merge = int(family.vision(config, "spatial_merge_size"))
    clamped = clamp_settings(settings, tokens=info.item_tokens_max, factor=patch * merge)
    for key, expected in (("patch_size", patch), ("merge_size", merge), ("do_resize", True)):
        if clamped.get(key) != expected:
            raise CheckpointError(
                f"the image processor's {key} is {clamped.get(key)!r}, config.json asks for {expected!r}. "
                "Remedy: use the processor settings that belong to this checkpoint."
            )
    return QwenPreprocessor(info, tokenizer, clamped, limits, _level_table(processor))


def _level_table(processor: Any) -> npt.NDArray[np.float32]:
    """Ask the processor what it makes of each value of each channel: float32 [channels, 256]."""
    channels = len(processor.image_mean)
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8), (channels, 1, 256))
    image: Any = np.ascontiguousarray(ramp)
    if processor.do_rescale:
        image = processor.rescale(image, processor.rescale_factor)
    if processor.do_normalize:
        image = processor.normalize(image, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).reshape(channels, 256))
