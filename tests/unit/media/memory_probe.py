"""Measure the memory of decoding and processing images, in a process of its own for exact numbers.

Arguments: width, height, and n, to measure every nth format. Prints a line of JSON for each case: the measured and the
estimated bytes.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.unit.media.fakes import FakePreprocessor, embedding_file, model_info, rows_of
from vsched.config import MediaConfig
from vsched.media.decode import decode, inspect
from vsched.media.embeddings import read_embedding, write_rows
from vsched.media.estimate import EMBEDDING_BYTES, decode_bytes, preprocess_bytes
from vsched.types import ModelInfo
from vsched.worker.contract import extent_bytes, view_arrays
from vsched_workers.checkpoint.preprocess import QwenPreprocessor
from vsched_workers.families.qwen_image import QwenImages, ResizeLimits

LIMITS = 10**8
Save = dict[str, Any]
CASES: Final[dict[str, tuple[str, str, Save]]] = {
    "png-rgb": ("PNG", "RGB", {}),
    "png-rgb-turned": ("PNG", "RGB", {"turned": True}),
    "png-rgb-transparent": ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    "png-rgba": ("PNG", "RGBA", {}),
    "png-rgba-turned": ("PNG", "RGBA", {"turned": True}),
    "png-palette": ("PNG", "P", {}),
    "png-palette-transparent": ("PNG", "P", {"transparency": 0}),
    "png-gray-alpha": ("PNG", "LA", {}),
    "png-gray-16": ("PNG", "I;16", {}),
    "png-1-bit": ("PNG", "1", {}),
    "png-animated": ("PNG", "RGBA", {"animated": True}),
    "jpeg": ("JPEG", "RGB", {}),
    "jpeg-turned": ("JPEG", "RGB", {"turned": True}),
    "jpeg-gray-progressive": ("JPEG", "L", {"progressive": True}),
    "jpeg-progressive": ("JPEG", "RGB", {"progressive": True}),
    "jpeg-progressive-444": ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
    "jpeg-cmyk": ("JPEG", "CMYK", {}),
    "jpeg-cmyk-progressive": ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}),
    "gif": ("GIF", "P", {}),
    "gif-transparent": ("GIF", "P", {"transparency": 0}),
    "bmp-rgb": ("BMP", "RGB", {}),
    "bmp-gray": ("BMP", "L", {}),
    "webp-lossy": ("WEBP", "RGB", {"method": 0}),
    "webp-alpha": ("WEBP", "RGBA", {"method": 0}),
    "webp-animated": ("WEBP", "RGBA", {"method": 0, "animated": True}),
    "webp-lossless": ("WEBP", "RGB", {"lossless": True, "method": 0, "quality": 0}),
}


@functools.lru_cache(2)  # each is measured twice
def encoded_image(name: str, width: int, height: int) -> bytes:
    kind, mode, save = CASES[name]
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 4), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(smooth.convert("L")).astype(np.uint16) * 256)
    elif mode in {"LA", "RGB", "RGBA"}:
        image = smooth.convert(mode)
    else:
        image = smooth.convert("RGB").convert(mode)
    options = dict(save)
    if options.pop("turned", False):
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    if options.pop("animated", False):
        frames = [image.transpose(Image.Transpose.ROTATE_180)]
        options |= {"save_all": True, "append_images": frames}
    if kind == "PNG":
        options["compress_level"] = 1
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def preprocessor(tokens_max: int) -> QwenPreprocessor:
    """Return the image half of the real preprocessor: its tokenizer would need a checkpoint."""
    made = QwenPreprocessor.__new__(QwenPreprocessor)
    made.info = model_info(item_tokens_max=tokens_max)
    made._images = QwenImages(
        patch=14,
        merge=2,
        resample=int(Image.Resampling.BICUBIC),
        limits=ResizeLimits(minimum=56 * 56, maximum=tokens_max * 28 * 28),
        levels=[[0.0] * 256] * 3,
    )
    return made


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def growth(work: Callable[[], object]) -> int:
    """Growth of the process while this runs; bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def measure_image(name: str, width: int, height: int, tokens_max: int) -> tuple[int, int]:
    """Return measured and estimated bytes, the file included in both; 0 tokens for decoding alone."""
    encoded = encoded_image(name, width, height)
    header = inspect(encoded, LIMITS)
    if not tokens_max:
        estimate = decode_bytes(header.width, header.height, header.storage)
        return growth(lambda: decode(encoded, LIMITS)) + len(encoded), estimate
    real = preprocessor(tokens_max)
    plan = real.plan_image(header.width, header.height)
    estimate = preprocess_bytes(header.width, header.height, header.storage, plan)
    extent = np.ones(extent_bytes(plan.arrays), np.uint8)

    def work() -> None:
        arrays = real.process_image(decode(encoded, LIMITS))
        for name, view in view_arrays(plan.arrays, extent).items():
            view[...] = arrays[name]

    return growth(work) + len(encoded), estimate


def measure_embedding(tokens: int) -> tuple[int, int]:
    info: ModelInfo = model_info(dtype="bfloat16", item_tokens_max=tokens)
    file = embedding_file(rows_of(tokens), (1, 2, 2 * tokens))
    embedding, _ = read_embedding(file, FakePreprocessor(info), MediaConfig())
    rows = np.ones(tokens * 8 * 2, np.uint8)
    grown = growth(lambda: write_rows(embedding, "bfloat16", rows))
    return grown + len(file), EMBEDDING_BYTES + len(file)


def main(width: int, height: int, every: int) -> None:
    gc.freeze()
    for name in [*CASES][::every]:
        measure_image(name, 64, 64, 16)  # loads the codec
        for tokens_max in (0, 1024):
            measured, estimate = measure_image(name, width, height, tokens_max)
            case = f"{name} {width}x{height} tokens {tokens_max}"
            print(json.dumps({"case": case, "measured": measured, "estimate": estimate}))
    measure_embedding(16)
    measured, estimate = measure_embedding(200_000)
    print(json.dumps({"case": "embedding", "measured": measured, "estimate": estimate}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
