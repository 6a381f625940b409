"""Conversion of conversations to tensors: token ids, positions, patches, and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from demo_training.drawing import LOOSE, OBJECT, Mark
from demo_training.model import MERGE, PATCH, VISION, VisionBatch
from demo_training.samples import DrawnConversation
from vsched_workers.checkpoint.preprocess import QwenPreprocessor
from vsched_workers.families.qwen_image import PIXELS, grid_of
from vsched_workers.families.qwen_levels import pixel_values
from vsched_workers.families.qwen_positions import frame_lengths, patch_places


@dataclass(frozen=True)
class TrainingRows:
    """Conversations of similar length, padded to the longest.

    Attributes:
        ids: Token ids, [rows, length].
        positions: Rotary positions, [3, rows, length].
        image_places: Flat indices of the image tokens.
        image_rows: The embedding row for each of these.
        asked: Flat indices of tokens whose next token is part of an answer.
        answers: These next tokens.
        turns: The turn of each of these tokens, numbered over all conversations.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    image_places: torch.Tensor
    image_rows: torch.Tensor
    requested: torch.Tensor
    answers: torch.Tensor
    turns: torch.Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """A batch: its images, its conversations in buckets, and the contents of its images.

    Attributes:
        marks: Contents of the images: rows of (embedding, quarter of its square, slot, value, shape).
        counts: For each embedding, the number of objects in its image.
        loose: For each embedding, whether its image shows digits that form no number.
    """

    vision: VisionBatch
    buckets: tuple[TrainingRows, ...]
    marks: torch.Tensor
    counts: torch.Tensor
    loose: torch.Tensor


@dataclass
class _Line:
    ids: list[int]
    positions: npt.NDArray[np.int64]
    places: list[int]
    rows: list[int]
    requested: list[int]
    turns: list[int]


def make_batch(
    samples: Sequence[DrawnConversation], front: QwenPreprocessor, *, buckets: int = 2
) -> TrainingBatch:
    """Make a batch; `turns` numbers the turns of all conversations in order."""
    pixels: list[npt.NDArray[np.float32]] = []
    grids: list[tuple[int, int]] = []
    marks: list[tuple[int, ...]] = []
    loose: list[bool] = []
    counts: list[int] = []
    lines = []
    begin = turns = 0
    for sample in samples:
        first = len(grids)
        for turn in sample.turns:
            for image, marked in zip(turn.images, turn.marks, strict=True):
                grid = grid_of(front.plan_image(image.width, image.height).metadata)
                pixels.append(_values(front, image))
                grids.append((grid[1] // MERGE, grid[2] // MERGE))
                tokens = grids[-1][0] * grids[-1][1]
                marks += [placed(mark, grids[-1], begin) for mark in marked]
                counts += [sum(mark.slot == OBJECT for mark in marked)] * tokens
                loose += [any(mark.slot == LOOSE for mark in marked)] * tokens
                begin += tokens
        if sample.turns[0].question:
            lines.append(_line(sample, front, grids[first:], begin, turns))
        turns += len(sample.turns)
    lines.sort(key=lambda line: len(line.ids))
    size = max(1, -(-len(lines) // buckets))
    rows = tuple(_rows(lines[at : at + size]) for at in range(0, len(lines), size))
    vision = _vision_batch(pixels, grids)
    found = torch.tensor(marks, dtype=torch.long).view(-1, 5)
    return TrainingBatch(vision, rows, found, torch.tensor(counts), torch.tensor(loose))


def _values(front: QwenPreprocessor, image: Image.Image) -> npt.NDArray[np.float32]:
    """Return the pixel values of an image as computed by an encode rank."""
    arrays = front.process_image(image)
    pixels = torch.from_numpy(arrays[PIXELS])
    return pixel_values(pixels, [arrays], torch.float32, temporal=1).numpy()


def placed(mark: Mark, grid: tuple[int, int], begin: int) -> tuple[int, ...]:
    """Return a mark's embedding, quarter of its square, slot, value and shape.

    The grid is the image's tokens down and across; `begin` is its first embedding.
    """
    down = min(grid[0] * MERGE - 1, max(0, int(mark.y * grid[0] * MERGE)))
    across = min(grid[1] * MERGE - 1, max(0, int(mark.x * grid[1] * MERGE)))
    square = down // MERGE * grid[1] + across // MERGE
    quarter = down % MERGE * MERGE + across % MERGE
    return begin + square, quarter, mark.slot, mark.value, mark.shape


def _line(
    sample: DrawnConversation,
    front: QwenPreprocessor,
    grids: Sequence[tuple[int, int]],
    end: int,
    first_turn: int,
) -> _Line:
    """Lay one conversation out like the chat template."""
    pad = front.info.placeholder
    ids: list[int] = []
    places: list[int] = []
    requested: list[int] = []
    turns: list[int] = []
    positions: list[npt.NDArray[np.int64]] = []
    following = 0
    left = list(grids)

    def text(tokens: Sequence[int]) -> None:
        nonlocal following
        ids.extend(tokens)
        steps = np.arange(following, following + len(tokens))
        positions.append(np.broadcast_to(steps, (3, len(tokens))))
        following += len(tokens)

    for number, turn in enumerate(sample.turns):
        text(front.tokenize("<|im_start|>user\n"))
        for _ in turn.images:
            height, width = left.pop(0)
            text(front.tokenize("<|vision_start|>"))
            down, across = (part.reshape(-1) for part in np.indices((height, width)))
            positions.append(following + np.stack((np.zeros_like(down), down, across)))
            places.extend(range(len(ids), len(ids) + height * width))
            ids.extend([pad] * (height * width))
            following += max(height, width)
            text(front.tokenize("<|vision_end|>"))
        text(front.tokenize(f"{turn.question}<|im_end|>\n<|im_start|>assistant\n"))
        answer = front.tokenize(f"{turn.answer}<|im_end|>")
        requested.extend(range(len(ids) - 1, len(ids) + len(answer) - 1))
        turns.extend([first_turn + number] * len(answer))
        text(answer)
        text(front.tokenize("\n"))
    rows = list(range(end - len(places), end))
    return _Line(ids, np.concatenate(positions, axis=1), places, rows, requested, turns)


def _rows(lines: Sequence[_Line]) -> TrainingRows:
    length = max(len(line.ids) for line in lines)
    ids = np.zeros((len(lines), length), dtype=np.int64)
    positions = np.zeros((3, len(lines), length), dtype=np.int64)
    flat: dict[str, list[int]] = {"places": [], "rows": [], "asked": [], "turns": []}
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = line.ids
        positions[:, row, : len(line.ids)] = line.positions
        flat["places"] += [row * length + place for place in line.places]
        flat["asked"] += [row * length + place for place in line.requested]
        flat["rows"] += line.rows
        flat["turns"] += line.turns
    requested = torch.tensor(flat["asked"])
    known = torch.from_numpy(ids)
    return TrainingRows(
        ids=known,
        positions=torch.from_numpy(positions),
        image_places=torch.tensor(flat["places"], dtype=torch.long),
        image_rows=torch.tensor(flat["rows"], dtype=torch.long),
        requested=requested,
        answers=known.view(-1)[requested + 1],
        turns=torch.tensor(flat["turns"]),
    )


def _vision_batch(
    pixels: Sequence[npt.NDArray[np.float32]], grids: Sequence[tuple[int, int]]
) -> VisionBatch:
    sizes = [(1, height * MERGE, width * MERGE) for height, width in grids]
    positions = torch.from_numpy(patch_places(sizes, MERGE))
    lengths = torch.tensor(frame_lengths(sizes))
    there = torch.arange(int(lengths.max())) < lengths[:, None]
    places = torch.zeros(there.shape, dtype=torch.long)
    places[there] = torch.arange(len(positions))
    down, across = (positions // (VISION["window_size"] // PATCH)).unbind(1)
    # Padding attends to padding: a row that attends to nothing would be no number.
    windows = torch.full(there.shape, -1)
    windows[there] = down * len(positions) + across
    return VisionBatch(
        patches=torch.from_numpy(np.concatenate(pixels)),
        positions=positions,
        places=places,
        there=there,
        in_image=there[:, None, :, None] == there[:, None, None, :],
        in_window=windows[:, None, :, None] == windows[:, None, None, :],
    )
