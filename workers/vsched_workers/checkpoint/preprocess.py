"""The front end of a checkpoint: chat template, tokenizer, image processor.

Tokenizer and image processor are loaded apart: the combined one needs torchvision. Placeholders are expanded here.

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
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import CheckpointError, RequestRefused, limit_message
from vsched.types import ArraySpec, ModelInfo, Spans
from vsched.worker.contract import Arrays, Companion, ImagePlan, ImageRecipe
from vsched.worker.expansion import expand_images
from vsched_workers.checkpoint.detokenize import ByteDetokenizer, TokenTable
from vsched_workers.checkpoint.facts import image_limits, processor_settings
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.image_processor import ImageProcessor, load_image_processor
from vsched_workers.checkpoint.special_tokens import RenderedPrompt, SpecialTokens
from vsched_workers.checkpoint.tokenizer_files import load_part, load_tokenizer
from vsched_workers.families import FAMILIES, family_of
from vsched_workers.families.generic_vision import (
    EMBEDDED_SIZE,
    embedded_size,
    pack_metadata,
    unpack_metadata,
)
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    QwenImages,
    ResizeLimits,
    clamp_settings,
    image_plan,
    resized,
)

IMAGE_PROCESSOR = "Qwen2VLImageProcessorPil"
"""The class of transformers for all these families, whatever older checkpoints call it."""

IMAGE_MARK = "\ufdd1"
"""Stands for an image in a message that the template is given as one string. Its marker would be a client's text."""

PLANS_KEPT = 256
"""Sizes of images whose plans are kept: they take as long to make as an image does."""
USUAL_SIZES = ((640, 480), (333, 333), (1500, 300))
SHRINK = 0.9
SHRINK_STEPS = 80
"""An image of too many tokens is made smaller by this factor until it has no more than allowed, so often at most."""

PROCESS_RATIO, RESIZE_BYTES = 5, 12
"""Most that a processor of transformers takes: bytes for each that it returns, and for each pixel that it is given."""


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
        return self._special.unmark(self._with_edges(str(rendered)))

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; other threads run meanwhile.

        A text that no template made begins with the tokenizer's first tokens, such as `<s>`.
        Special tokens are recognised but for those in messages. Without `images` the image placeholder is text.

        Raises:
            RequestRefused: When they exceed the context, or a stretch of text cannot be divided.
        """
        if images and not isinstance(text, RenderedPrompt):
            text = self._with_edges(text)
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

    def _with_edges(self, text: str) -> str:
        """Return a text with what is to stand beside each image in it: nothing."""
        return text

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
        self._channels = len(levels)
        self._images = QwenImages(
            patch=self._patch,
            merge=self._merge,
            temporal=self._temporal,
            resample=int(settings["resample"]),
            limits=limits,
            levels=levels.tolist(),
        )
        self.settings_digest = _digest(info, settings, limits)

    def image_recipe(self) -> ImageRecipe:
        """Return how a process makes what processes images, without tokenizer and torch."""
        return self._images.recipe()

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
            raise too_many_tokens(width, height, plan.tokens, self.info.item_tokens_max)
        return plan

    def _plan(self, grid: tuple[int, int, int], work_bytes: int = 0) -> ImagePlan:
        channels = self._channels
        return image_plan(
            grid,
            merge=self._merge,
            patch_values=channels * self._temporal * self._patch * self._patch,
            work_bytes=work_bytes,
        )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        check_sides(width, height)
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
        self.plan_image(image.width, image.height)
        return self._images.process_image(image)

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th image placeholder as `plans[i]` says; return the ids, and each image's placeholders.

        Raises:
            RequestRefused: When placeholders and images differ in number, or two images touch.
        """
        placeholder = self.info.placeholder
        expanded = expand_images(token_ids, plans, placeholder=placeholder)
        if _touching(token_ids, placeholder):
            raise RequestRefused(PLACEHOLDERS_TOUCH, code="image_placeholders_touch")
        return expanded


def check_sides(width: int, height: int) -> None:
    """Refuse an image without pixels."""
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


def too_many_tokens(width: int, height: int, tokens: int, limit: int) -> RequestRefused:
    """Word that an image has more tokens than it may have."""
    return RequestRefused(
        limit_message(
            f"an image of {width} x {height} pixels has too many tokens",
            value=tokens,
            limit=limit,
            remedy="send an image that is less thin, or raise the token budget of one image",
        ),
        code="image_tokens_exceeded",
    )


def _touching(token_ids: Sequence[int], marker: int) -> bool:
    return any(one == next_one == marker for one, next_one in itertools.pairwise(token_ids))


PLACEHOLDERS_TOUCH = (
    "two image placeholders stand side by side. Remedy: separate them as the chat template does."
)


class AnyPreprocessor(TextPreprocessor):
    """Tokenizer, chat template and image processor of any architecture that takes images."""

    companion = EMBEDDED_SIZE

    def __init__(self, info: ModelInfo, tokenizer: Any, processor: ImageProcessor) -> None:
        super().__init__(info, tokenizer)
        self.processor = processor
        self._placeholder = processor.marker
        self._marker: int = tokenizer.convert_tokens_to_ids(processor.marker)
        settings = json.dumps(processor.settings, sort_keys=True, default=str)
        self.settings_digest = _digest_of(
            b"vsched.arrays.1",
            info.family.encode(),
            version("transformers").encode(),
            settings.encode(),
            str(info.item_tokens_max).encode(),
        )
        self._plan = lru_cache(PLANS_KEPT)(self._plan_of)
        self._fitting = lru_cache(PLANS_KEPT)(self._fit)
        self._edges = ("", "")
        edges = {self._edges_of(processor.shape(*size).text) for size in USUAL_SIZES}
        if len(edges) == 1:  # else they are tokenized with the image alone
            self._edges = edges.pop()
        self._takes_parts = self._renders([{"type": "image"}], processor.marker)
        self._takes_text = self._renders("vsched", "vsched")

    def _renders(self, content: Any, wanted: str) -> bool:
        """Return whether the chat template writes what is wanted for a message of this content."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
        return wanted in text

    def _edges_of(self, text: str) -> tuple[str, str]:
        """Return the plain text that an expansion begins and ends with.

        It is tokenized together with the text beside the image, as two line breaks with a third one before them.
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
        return text.replace(IMAGE_MARK, f"{before}{self._placeholder}{after}")

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each image by a bare part, or by its marker where the template knows no parts."""
        content = message.get("content")
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
            return {**message, "content": content if self._takes_text else parts}
        if not isinstance(content, list):
            return dict(message)
        parts = [
            {"type": "image"}
            if isinstance(part, Mapping) and part.get("type") in {"image", "image_url"}
            else part
            for part in content
        ]
        if self._takes_parts:
            return {**message, "content": parts}
        lines = [
            IMAGE_MARK if part.get("type") == "image" else part.get("text", "") for part in parts
        ]
        return {**message, "content": "\n".join(lines)}

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return what an image of this size becomes.

        Raises:
            RequestRefused: When the image is empty, of a shape that the processor does not take, or of too many tokens.
        """
        check_sides(width, height)
        return self._plan(*self._fitting(width, height))

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of an image by its height and width; refuses as `plan_image` does."""
        return self.plan_image(*embedded_size(companion))

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an image is made smaller, so that it has no more tokens than allowed."""
        fewest = 0
        for step in range(SHRINK_STEPS):
            size = [max(1, round(side * SHRINK**step)) for side in (width, height)]
            tokens = self._plan(*size).tokens
            if tokens <= self.info.item_tokens_max:
                return size[0], size[1]
            fewest = min(tokens, fewest or tokens)
            if max(size) == 1:
                break
        raise too_many_tokens(width, height, fewest, self.info.item_tokens_max)

    def _plan_of(self, width: int, height: int) -> ImagePlan:
        try:
            shape = self.processor.shape(width, height)
        except (ValueError, ArithmeticError) as error:
            # What the processor says of an image of no pixels but its size.
            raise RequestRefused(
                f"an image of {width} x {height} pixels cannot be processed: {error} "
                "Remedy: crop or pad the image.",
                code="image_aspect_ratio",
            ) from error
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

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, but for its metadata.

        Raises:
            RequestRefused: As `plan_image`.
        """
        check_sides(image.width, image.height)
        size = self._fitting(image.width, image.height)
        if image.mode != "RGB":
            image = image.convert("RGB")
        if image.size != size:
            image = image.resize(size, resample=Image.Resampling.BICUBIC)
        return self.processor.process(image)

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th image marker as `plans[i]` says; return the ids, and each image's placeholders.

        Raises:
            RequestRefused: When markers and images differ in number, or two images touch whose positions follow from
                where they begin and end.
        """
        expanded = expand_images(
            token_ids, plans, placeholder=self.info.placeholder, marker=self._marker
        )
        grids = any(
            name.endswith("_thw") for plan in plans for name in unpack_metadata(plan.metadata)
        )
        if grids and _touching(token_ids, self._marker):
            raise RequestRefused(PLACEHOLDERS_TOUCH, code="image_placeholders_touch")
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
    return _digest_of(
        b"vsched.pixels.1",
        info.family.encode(),
        json.dumps(settings, sort_keys=True, default=str).encode(),
        f"{limits.minimum} {limits.maximum}".encode(),
    )


def _digest_of(*parts: bytes) -> bytes:
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
    if info.family not in FAMILIES:
        processor = load_image_processor(directory, info.family, tokenizer, info.placeholder)
        return AnyPreprocessor(info, tokenizer, processor)
    config = read_json(directory, "config.json")
    family = family_of(config)
    limits = image_limits(family, config, processor_settings(directory), info.item_tokens_max)
    part = load_part(IMAGE_PROCESSOR, directory, "image processor")
    settings = part.to_dict()
    patch = int(family.vision(config, "patch_size"))
    merge = int(family.vision(config, "spatial_merge_size"))
    clamped = clamp_settings(settings, tokens=info.item_tokens_max, factor=patch * merge)
    for key, expected in (("patch_size", patch), ("merge_size", merge), ("do_resize", True)):
        if clamped.get(key) != expected:
            raise CheckpointError(
                f"the image processor's {key} is {clamped.get(key)!r}, config.json asks for {expected!r}. "
                "Remedy: use the processor settings that belong to this checkpoint."
            )
    return QwenPreprocessor(info, tokenizer, clamped, limits, _level_table(part))


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
