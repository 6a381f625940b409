"""The image processor of any architecture, from transformers: arrays and placeholder text of images.

Arrays and text follow from an image's size alone, and are determined by processing a hollow image of that size
(`hollow_images.py`), or a blank one for processors with other pixel operations. Callers cache the results. Processors
on Pillow and numpy are preferred; the others need torchvision.

Transformers' combined processor is built without its video and audio parts, which would need torchvision or torch. Only
two of its steps are used: images to arrays, and arrays to placeholder text. The others tokenize, which is not
thread-safe. A process without torch hides torch before transformers is imported (`forgo_torch`).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import CheckpointError, ConfigError
from vsched.worker.contract import FrameSize
from vsched_workers.checkpoint.files import read_if_there, read_json
from vsched_workers.checkpoint.tokenizer_files import load_part
from vsched_workers.families.generic import is_metadata, refusal
from vsched_workers.families.qwen_image import ResizeLimits

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files that may name the image processor's class: the newer layout, within `image_processor`, and the older."""

EXTRA = "pip install 'vsched[torchvision]'"


def forgo_torch(directory: Path) -> None:
    """Hide torch from transformers, which imports it even for tokenizers: that takes three seconds and 250 MB.

    If torchvision processes the images of this checkpoint, torch is kept, with one thread: images are processed in
    several threads already.
    """
    if "torch" in sys.modules:
        return
    if has_torchvision() and not on_pillow(directory):
        import torch

        torch.set_num_threads(1)
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def has_torchvision() -> bool:
    """Return whether torchvision is installed."""
    return importlib.util.find_spec("torchvision") is not None


def on_pillow(directory: Path) -> bool:
    """Return whether transformers has an image processor for the checkpoint that does without torchvision."""
    stated = stated_image_settings(directory) or {}
    name = str(stated.get("image_processor_type", "")).removesuffix("Fast")
    known = _image_processors()
    kinds = [kind for kind in known.values() if kind and name in kind.values()]
    family = read_json(directory, "config.json").get("model_type", "")
    kinds = kinds or [kind for kind in (known.get(family),) if kind]
    return not kinds or any("pil" in kind for kind in kinds)


def stated_image_settings(directory: Path) -> dict[str, Any] | None:
    """Return the settings of the image processor in a checkpoint; None without any."""
    newer, older = (read_if_there(directory, name) for name in PROCESSOR_FILES)
    nested = (each.get("image_processor") for each in (newer, older))
    return next((each for each in nested if isinstance(each, dict)), older or None)


def needs_torchvision(family: str) -> CheckpointError:
    """Return the error that only torchvision can process a model's images, and is not installed."""
    return CheckpointError(
        f"config.json: model_type {family!r} has an image processor that transformers has for torchvision alone, which "
        f"is not installed. Remedy: {EXTRA}; it brings torch into the engine's process, three seconds and 250 MB."
    )


@cache
def _image_processors() -> Mapping[str, Mapping[str, str]]:
    """Return the classes of transformers' image processors by library, by `model_type`.

    The file is a table without imports; importing its package would look for torch.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None, "vsched-workers depends on it"
    assert package.origin is not None, "it is a folder with an __init__.py"
    path = Path(package.origin).with_name("models") / "auto" / "auto_mappings.py"
    spec = importlib.util.spec_from_file_location("vsched_image_processors", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Mapping[str, Mapping[str, str]] = module.IMAGE_PROCESSOR_MAPPING_NAMES
    return found


STATING_FILES = (*PROCESSOR_FILES, "tokenizer_config.json")
"""Files that may name the processor's class, in transformers' order of precedence."""

PROBED_SIDES = (64, 333, 700)
FEW_SIDES = (224, 448, 896, 1344, 2048)
SIDES = (14, 28, *range(32, 1025, 32), *range(1120, 2049, 112), 3072, 4096)
"""Sides of trial images: to detect a fixed number of tokens; without a fast count; and with one."""
PROMISING = 5
"""The number of most promising sizes to try."""

ASPECT_RATIO_MAX = 200
"""Longer over shorter side, for processors without a limit of their own."""

BLANK_PIXELS_MAX = 1 << 24
"""Maximum pixels of a blank image: processing takes 12 bytes per pixel, which no budget includes."""

TRIED = (333, 210)
"""The size of a trial that compares a hollow image with a blank one."""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The result of processing an image of some size.

    Attributes:
        arrays: dtype and shape of each array by its name.
        small: The arrays whose values are an image's metadata; they follow from the size, too, and are not in `arrays`.
        text: The image's placeholder text in a prompt, before tokenization.
    """

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    small: Mapping[str, npt.NDArray[Any]]
    text: str


class ImageProcessor:
    """Processes images with transformers' processor of a checkpoint.

    All methods are thread-safe.

    Attributes:
        marker: The mark of one image in a prompt, as written by a chat template.
        placeholder: The text of the placeholder token, once per embedding row.
        pixels_max: The maximum pixels of an image for `shape`; None without a limit.
    """

    def __init__(self, processor: Any, placeholder: str, *, tensors: str = "np") -> None:
        """Take transformers' processor, and the type of its tensors: `np`, or `pt` for torchvision."""
        self._processor = processor
        self.marker: str = processor.image_token
        self.placeholder = placeholder
        requested: dict[str, Any] = processor._merge_kwargs(  # noqa: SLF001
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors=tensors
        )
        self._options = requested["images_kwargs"] | _named_options(processor, requested)
        self._shaping = threading.Lock()
        self._hollow = self._hollow_processor()
        self.pixels_max = None if self._hollow is not None else BLANK_PIXELS_MAX

    def _hollow_processor(self) -> Any:
        """Return the processor for hollow images; None if its results differ."""
        from vsched_workers.checkpoint.hollow_images import hollow_processor

        made = hollow_processor(self._processor)
        if made is None:
            return None
        try:
            arrays, text = self._process_image(_hollow_image(*TRIED), made)
            wanted, wanted_text = self._process_image(Image.new("RGB", TRIED), self._processor)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
            return None
        spared = made.image_processor.spared
        equal = spared and text == wanted_text and arrays.keys() == wanted.keys()
        return made if equal and all(map(_alike, arrays.values(), wanted.values())) else None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the arrays of an image."""
        own = self._processor.image_processor
        return {"class": type(own).__name__, "own": own.to_dict(), "options": repr(self._options)}

    @property
    def area(self) -> tuple[ResizeLimits, int] | None:
        """The limits of an image's area in pixels after resizing, and the side of the squares in it.

        None if the processor has other rules for resizing.
        """
        own = self._processor.image_processor
        size = dict(self._options.get("size") or own.size or {})
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        known = hasattr(sys.modules[type(own).__module__], "smart_resize")
        if not known or least is None or most is None:
            return None
        side = int(getattr(own, "patch_size", 1)) * int(getattr(own, "merge_size", 1))
        return ResizeLimits(int(least), int(most)), side

    def within(self, limits: ResizeLimits) -> ImageProcessor:
        """Return the processor with other limits of the image area; requires an `area`."""
        made = copy.copy(self)
        size = {"shortest_edge": limits.minimum, "longest_edge": limits.maximum}
        made._options = {**self._options, "size": size}  # noqa: SLF001 - its own
        return made

    def process(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of an RGB image, without its metadata."""
        arrays, _ = self._process_image(image, self._processor)
        return {name: array for name, array in arrays.items() if not is_metadata(array)}

    def tokens(self, width: int, height: int) -> int:
        """Return the number of embedding rows of an image of this size."""
        return self.shape(width, height).text.count(self.placeholder)

    def reported(self, sizes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Return transformers' counts of tokens for images of these sizes, if it has a function for that.

        With some processors, they include all of the placeholder text, not only the embedding rows.
        """
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None or not sizes:
            return {}
        try:
            found = count(image_sizes=[(height, width) for width, height in sizes])
            return dict(zip(sizes, map(int, found.num_image_tokens), strict=True))
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError):
            if len(sizes) == 1:
                return {}
            middle = len(sizes) // 2  # one invalid size fails the whole call
            return self.reported(sizes[:middle]) | self.reported(sizes[middle:])

    def shape(self, width: int, height: int) -> ImageShape:
        """Return the result for an image of this size; one call at a time, to limit memory."""
        with self._shaping:
            if self._hollow is not None:
                arrays, text = self._process_image(_hollow_image(width, height), self._hollow)
            else:
                arrays, text = self._process_image(
                    Image.new("RGB", (width, height)), self._processor
                )
        small = {name: array for name, array in arrays.items() if is_metadata(array)}
        specs = {
            name: (array.dtype.name, array.shape)
            for name, array in arrays.items()
            if name not in small
        }
        return ImageShape(specs, small, text)

    @property
    def video_marker(self) -> str:
        """The mark of one video in a prompt, as written by a chat template; empty if it has none."""
        return str(getattr(self._processor, "video_token", None) or "")

    @property
    def video_template(self) -> str:
        """The chat template for messages with videos, if the checkpoint's own is not to be used for them."""
        module = sys.modules[type(self._processor).__module__]
        return str(getattr(module, "DEFAULT_CHAT_TEMPLATE", ""))

    def video_text(
        self,
        seconds: Sequence[float],
        duration: float,
        size: FrameSize,
        grid: Sequence[int],
        settings: Mapping[str, Any],
    ) -> str:
        """Return a video's placeholder text in a prompt, before tokenization.

        `seconds` are the times of its sampled frames, `grid` its patches in time, height and width, and `settings`
        those of the video processor.
        """
        from transformers.video_utils import VideoMetadata

        processor = copy.copy(self._processor)
        processor.video_processor = types.SimpleNamespace(**settings)
        shape = (1, len(seconds), 3, size.height, size.width)
        hollow = np.broadcast_to(np.float32(0), shape)
        indices: list[Any] = list(seconds)  # at one frame per second
        metadata = VideoMetadata(len(seconds), fps=1.0, duration=duration, frames_indices=indices)
        made = {
            "pixel_values": hollow,
            "pixel_values_videos": hollow,
            "video_grid_thw": np.array([grid]),
            "video_metadata": [metadata],
        }
        return str(processor.replace_video_token(made, 0))

    def _process_image(self, image: Any, processor: Any) -> tuple[dict[str, npt.NDArray[Any]], str]:
        images, *_ = processor.prepare_inputs_layout(images=[image], text=[self.marker])
        made, texts = processor._process_images(images, **self._options)  # noqa: SLF001
        arrays = {}
        for name in sorted(made):
            array = np.asarray(made[name])
            if array.dtype.kind in "biuf":
                double = array.dtype == np.float64
                arrays[name] = np.ascontiguousarray(array, np.float32 if double else None)
        return arrays, str(texts[0])


def _named_options(processor: Any, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named parameters for processing images, apart from the options of the image processor."""
    taken = inspect.signature(processor._process_images).parameters.values()  # noqa: SLF001
    names = {each.name for each in taken if each.kind is not inspect.Parameter.VAR_KEYWORD}
    return {name: value for name, value in requested.items() if name in names}


def _hollow_image(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return a hollow image, [height, width, 3]."""
    return np.broadcast_to(np.uint8(0), (height, width, 3))


def _alike(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether arrays have the same type and shape, and metadata the same values."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and (not is_metadata(one) or bool((one == other).all()))


def load_image_processor(
    directory: Path, family: str, tokenizer: Any, image_token_id: int
) -> ImageProcessor:
    """Load the image processor of a checkpoint; `tokenizer` is transformers' tokenizer of the checkpoint.

    Raises:
        CheckpointError: When it cannot be loaded, or needs a package that is not installed.
    """
    name = _processor_name(directory, family)
    placeholder = tokenizer.backend_tokenizer.id_to_token(image_token_id)
    if placeholder is None:
        raise refusal(family, f"an image placeholder, {image_token_id}, that its tokenizer lacks")
    processor_class = _processor_class(name, family)
    pillow = on_pillow(directory)
    if not pillow and not has_torchvision():
        raise needs_torchvision(family)
    library = "pil" if pillow else "torchvision"
    own = load_part("AutoImageProcessor", directory, "image processor", backend=library)
    settings = read_if_there(directory, STATING_FILES[0])
    parts = {"image_processor": own, "tokenizer": tokenizer}
    # It warns of images with three rows, again in each call, and reads them correctly.
    logging.getLogger("transformers.image_utils").setLevel(logging.ERROR)
    try:
        processor = _made(processor_class, parts, settings)
        made = ImageProcessor(processor, placeholder, tensors="np" if pillow else "pt")
        shape = made.shape(224, 224)
    except Exception as error:
        # Transformers' code runs on the settings of a checkpoint here: any exception means that it cannot be used.
        raise CheckpointError(
            f"the processor {name} of the checkpoint cannot be used ({type(error).__name__}: {error}). "
            "Remedy: give the directory of a complete checkpoint."
        ) from error
    if tokenizer.backend_tokenizer.token_to_id(made.marker) is None:
        raise refusal(family, f"images for which a prompt has {made.marker!r}, which is no token")
    if not shape.text.count(placeholder):
        raise refusal(family, f"images for which a prompt has no token {placeholder!r}")
    return made


def tokens_max(processor: ImageProcessor, budget: int) -> int:
    """Return the most tokens that an image may have within the configured budget, 0 for none.

    Images that the search misses are shrunk slightly more than necessary.

    Raises:
        ConfigError: When all images have more.
        ValueError: When the processor accepts no image.
    """
    found = set()
    for size in revealing_sizes(processor):
        with suppress(ValueError):  # too thin or too small for the processor
            found.add(processor.tokens(*size))
    if budget and budget < min(found):
        raise ConfigError.of_limit(
            "the token budget of one image is below the tokens of the smallest image",
            value=budget,
            limit=min(found),
            remedy="raise encode.admission.max_tokens",
        )
    return min(max(found), budget or max(found))


def revealing_sizes(
    processor: ImageProcessor, pixels_max: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield sizes of images, of at most `pixels_max` pixels, some with the most and the fewest tokens.

    If transformers can count the tokens of a size without an image, many sizes are counted and the most promising ones
    yielded; otherwise a few of all shapes.
    """
    first = _sizes(PROBED_SIDES, pixels_max)
    yield from first
    counts = set()
    for size in first:
        with suppress(ValueError):
            counts.add(processor.tokens(*size))
    if len(counts) > 1:
        reported = processor.reported(_sizes(SIDES, pixels_max))
        ranked = sorted(reported, key=lambda size: (-reported[size], size[0] * size[1]))
        yield from ranked[:PROMISING] or _sizes(FEW_SIDES, pixels_max)
        yield from ranked[-1:]


def _sizes(sides: Sequence[int], pixels_max: int | None) -> list[tuple[int, int]]:
    return [
        (width, height)
        for width, height in product(sides, sides)
        if max(width, height) <= ASPECT_RATIO_MAX * min(width, height)
        and (pixels_max is None or width * height <= pixels_max)
    ]


def _processor_name(directory: Path, family: str) -> str:
    """Return the class of the processor: from a file, or else from the architecture."""
    from transformers.models.auto import processing_auto

    known: Mapping[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    for file in STATING_FILES:
        stated = read_if_there(directory, file).get("processor_class")
        if stated in known.values():
            return str(stated)
    name = known.get(family)
    if name is None:
        raise CheckpointError(
            f"config.json: model_type {family!r} has no processor for images in transformers, and none of the files "
            f"{', '.join(STATING_FILES)} names one. Remedy: add processor_class to {STATING_FILES[0]}."
        )
    return name


def _processor_class(name: str, family: str) -> Any:
    """Return transformers' class of a processor.

    Some modules import a function from the torchvision variant of their image processor that the Pillow variant has,
    too.
    """
    import transformers

    module = transformers._class_to_module[name]  # type: ignore[attr-defined]  # noqa: SLF001
    part = str(module).rpartition("processing_")[2]
    package = f"transformers.models.{part}"
    try:
        with _pillow_in_place_of_torchvision(package, part):
            found = importlib.import_module(f"{package}.processing_{part}")
    except ImportError as error:
        raise needs_torchvision(family) from error
    return getattr(found, name)


@contextmanager
def _pillow_in_place_of_torchvision(package: str, part: str) -> Iterator[None]:
    wanted, there = (f"{package}.image_processing_{kind}{part}" for kind in ("", "pil_"))
    try:
        importlib.import_module(wanted)
    except ImportError:
        with suppress(ImportError):
            sys.modules[wanted] = importlib.import_module(there)
    try:
        yield
    finally:
        if sys.modules.get(wanted) is sys.modules.get(there, object):
            del sys.modules[wanted]


def _made(processor_class: Any, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Build a processor without its parts for video and audio."""

    def any_class(_self: Any, _name: str, _part: Any) -> None:
        """Accept missing parts."""

    kind: Any = type(
        processor_class.__name__,
        (processor_class,),
        {"check_argument_for_proper_class": any_class, "__module__": processor_class.__module__},
    )
    given = [parts.get(name) for name in kind.get_attributes()]
    return kind.from_args_and_dict(given, dict(settings))
