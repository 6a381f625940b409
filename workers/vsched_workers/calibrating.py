"""Calibration: run texts and images through a model and record the inputs of its linear layers.

The workers run as in serving, on transformers' modules with forward hooks; each prompt is prefilled alone. The texts
are a file of lines, as for other calibration tools: consecutive lines are joined until a prompt is full. Each image has
a prompt of its own, followed by one line of the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

from vsched.errors import ConfigError
from vsched.types import ItemPlace, ModelInfo, SamplingParams
from vsched.worker.contract import (
    Batch,
    Chunk,
    EncodeJob,
    ItemRows,
    Preprocessor,
    Progress,
    SequenceState,
    WorkerSettings,
)
from vsched_workers.backends.reference.packed_weights import PackedLinear, is_packed
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.preprocess import load_preprocessor
from vsched_workers.language import LanguageWorker, load_generator
from vsched_workers.quantized.calibration import Part, Squares, write_calibration
from vsched_workers.quantized.layers import head_of
from vsched_workers.vision import VisionWorker, load_encoder

PROMPT_TOKENS = 512
BLOCK_SIZE = 16
_NONE = np.empty(0, dtype=np.int32)


class _CalibrationPrompt(NamedTuple):
    """A prompt, its images, and their embedding rows, uint8 [images, rows, bytes]: one page per image."""

    tokens: Sequence[int]
    items: Sequence[ItemPlace]
    embeddings: npt.NDArray[np.uint8]


def calibrate(
    info: ModelInfo,
    settings: WorkerSettings,
    file: Path,
    progress: Progress,
    *,
    texts: Sequence[str],
    images: Sequence[Image.Image],
) -> int:
    """Calibrate on lines of text and RGB images, and write the file; return its number of layers.

    Raises:
        CheckpointError, ConfigError: When the model cannot be loaded, takes no images, or there is no input.
    """
    if images and not info.takes_images:
        raise ConfigError(
            f"--images: {len(images)} images, but the model takes none. Remedy: leave it out."
        )
    preprocessor = load_preprocessor(info)
    limit = min(PROMPT_TOKENS, info.context_tokens)
    prompts = [
        _CalibrationPrompt(each, (), _rows(info, 1, 1))
        for each in _filled(preprocessor, texts, limit)
    ]
    if not prompts:
        raise ConfigError("--texts: no line with any token. Remedy: give a file with texts.")
    settings = dataclasses.replace(
        settings, device="cpu", attention="exact", weights="auto", calibration="", activations="auto",
        ranks=1, rank=0, rendezvous="", deterministic=False, adapters=0, slots=1, state_snapshots=0,
    )  # fmt: skip
    squares: dict[Part, Squares] = {}
    if images:
        encoder = load_encoder(info, settings, progress)
        with _watched(encoder.module) as seen:
            for index, image in enumerate(images):
                line = texts[index % len(texts)]
                prompts.append(_with_image(info, preprocessor, encoder, image, line))
                progress("images", (index + 1) / len(images))
        squares["vision"] = seen.means()
        del encoder
    generator = load_generator(info, settings, progress)
    longest = max(len(each.tokens) for each in prompts)
    generator.build_kv(blocks=longest // BLOCK_SIZE + 1, block_size=BLOCK_SIZE)
    with _watched(generator.module) as seen:
        for index, prompt in enumerate(prompts):
            _prefill(generator, index, prompt)
            progress("prompts", (index + 1) / len(prompts))
    squares["language"] = seen.means()
    tokens = sum(len(each.tokens) for each in prompts)
    said = {"tokens": str(tokens), "images": str(len(images))}
    write_calibration(file, checkpoint_directory(info.path), squares, said)
    return sum(map(len, squares.values()))


def _filled(preprocessor: Preprocessor, texts: Sequence[str], limit: int) -> Iterator[list[int]]:
    """Yield prompts of at most `limit` tokens, of consecutive lines; longer lines are cut."""
    prompt: list[int] = []
    for line in texts:
        tokens = preprocessor.tokenize(line, images=False)[:limit]
        if len(prompt) + len(tokens) > limit:
            yield prompt
            prompt = []
        prompt = prompt + tokens
    if prompt:
        yield prompt


def _rows(info: ModelInfo, images: int, tokens: int) -> npt.NDArray[np.uint8]:
    return np.zeros((images, tokens, info.embedding_row_bytes), dtype=np.uint8)


def _with_image(
    info: ModelInfo,
    preprocessor: Preprocessor,
    encoder: VisionWorker,
    image: Image.Image,
    text: str,
) -> _CalibrationPrompt:
    """Encode an image; return a prompt that contains it."""
    content = [{"type": "image"}, {"type": "text", "text": text}]
    rendered = preprocessor.render([{"role": "user", "content": content}])
    plan = preprocessor.plan_image(*image.size)
    tokens, (runs,) = preprocessor.expand(preprocessor.tokenize(rendered), [plan])
    arrays = preprocessor.process_image(image)
    embeddings = _rows(info, 1, plan.tokens)
    encoder.encode([EncodeJob(b"", plan.tokens, arrays, plan.metadata, [0])], embeddings)
    return _CalibrationPrompt(
        tokens, [ItemPlace(runs[0][0], plan.tokens, plan.metadata, runs)], embeddings
    )


def _prefill(generator: LanguageWorker, number: int, prompt: _CalibrationPrompt) -> None:
    """Prefill one prompt in one step."""
    count = len(prompt.tokens)
    sequence = SequenceState(
        number=number,
        tokens=np.array([*prompt.tokens, 0], dtype=np.int32),
        length=count,
        prompt_length=count,
        items=prompt.items,
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=frozenset(),
    )
    generator.prepare(sequence)
    items = [
        ItemRows(index, position, row, row + rows, [index])
        for index, place in enumerate(prompt.items)
        for position, row, rows in place.rows(0, count)
    ]
    blocks = count // BLOCK_SIZE + 1
    generator.step(
        Batch(
            decode_slots=_NONE,
            decode_tokens=_NONE,
            decode_positions=_NONE,
            decode_sequences=[],
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            embeddings=prompt.embeddings,
            chunks=[Chunk(0, sequence, 0, count, samples=True, items=items)],
        )
    )


class _SeenInputs:
    """Sums of squares of the inputs of layers, float64 [in], and the number of rows that were added."""

    def __init__(self, inputs: dict[str, int]) -> None:
        self._sums = {
            name: torch.zeros(count, dtype=torch.float64) for name, count in inputs.items()
        }
        self._rows = dict.fromkeys(inputs, 0)

    def add(self, name: str, given: torch.Tensor) -> None:
        rows = given.detach().reshape(-1, given.shape[-1]).float()
        self._sums[name] += rows.square().sum(0, dtype=torch.float64)
        self._rows[name] += len(rows)

    def means(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return mean squares; those of an unused layer are zero, so all its input channels have equal weight."""
        return {
            name: (total / max(self._rows[name], 1)).float().numpy()
            for name, total in self._sums.items()
        }


@contextmanager
def _watched(module: Any) -> Iterator[_SeenInputs]:
    """Record the inputs of a module's linear layers that are quantized on loading, until the context ends."""
    head = head_of(module)
    linears: dict[str, Any] = {
        name: child
        for name, child in module.named_modules()
        if (is_packed(child, name) or type(child) is PackedLinear) and child is not head
    }
    seen = _SeenInputs({name: child.in_features for name, child in linears.items()})
    hooks = []
    for name, child in linears.items():

        def watch(_module: nn.Module, given: tuple[Any, ...], name: str = name) -> None:
            seen.add(name, given[0])

        hooks.append(child.register_forward_pre_hook(watch))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
