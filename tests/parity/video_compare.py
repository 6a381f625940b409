"""Answers about videos, compared with `generate` for whole videos and the prompt of transformers' own processor."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.parity.architectures import FAMILY_SIZES, make_checkpoint
from tests.parity.compare import OUTPUTS, Parity, expected, inputs_of_text, library_model, load_on
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.parity.vision_compare import compared_in_steps
from tests.workers.driver import Clip, Driver, Question, Stage, drawn_image, values_of
from vsched.media.pruning import pruned_group
from vsched.worker.contract import Arrays, Preprocessor, VideoPlan
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.checkpoint.preprocess import AnyPreprocessor
from vsched_workers.families.generic import VIDEO_GRID, unpack_metadata
from vsched_workers.families.qwen_image import LEVELS, PIXELS, grid_of, time_of

SIDES = (60, 40)
"""Width and height of frames and images."""

UNMIXED = ("glm4v", "glm4v_moe")
"""Architectures for which transformers does not mix images and videos in a prompt."""

LISTED = ("pixel_values", "pixel_attention_mask")
"""Arguments that have a dimension for the images of a prompt, if their first one is 1."""


def clip(seed: int, frames: int, fps: float = 2.0) -> Clip:
    """Return a video of different frames."""
    return Clip([drawn_image(100 * seed + index, *SIDES) for index in range(frames)], fps)


def questions(name: str) -> list[Question]:
    """Return questions about one long video, an image and a video, two videos, and none."""
    short, other = clip(2, 4), clip(3, 4)
    image = [] if name in UNMIXED else [drawn_image(7, *SIDES)]
    return [
        Question("what comes first?", [clip(1, 7)], count=OUTPUTS),
        Question("is this in it?", [*image, short], count=OUTPUTS),
        Question("compare", [short, other], count=OUTPUTS),
        Question("who are you?", count=OUTPUTS),
    ]


def compare_video(name: str, *, device: str = "cpu") -> Parity:
    """Create a checkpoint of an architecture and compare."""
    with tempfile.TemporaryDirectory(prefix="vsched-video-") as folder:
        make = make_checkpoint if name in FAMILY_SIZES else make_vision_checkpoint
        make(name, Path(folder))
        stage = load_on(device, folder)
        model = library_model(folder, sees=True).to(device)
        asked = questions(name)
        wanted = []
        for question in asked:
            ids = prompt_of(stage, question)
            assert stage.prompt(question)[0] == ids, "the prompt differs from transformers'"
            wanted.append(expected(model, inputs_of(stage, model, question, ids)))
        return compared_in_steps(describe_checkpoint(folder).path, stage, asked, wanted)


KEPT = ("11111111", "00010011", "00000000", "01101000")
"""The tokens of each frame group of a pruned video."""


@dataclass(frozen=True)
class PrunedClip(Clip):
    """A video with the tokens of `KEPT`."""

    def plan(self, preprocessor: Preprocessor) -> VideoPlan:
        plan = super().plan(preprocessor)
        assert plan.row_token is not None
        return replace(
            plan,
            groups=tuple(
                pruned_group(group, bytes(map(int, kept)), plan.row_token, keeps_text=True)
                for group, kept in zip(plan.groups, KEPT, strict=True)
            ),
        )


def answers_about_pruned_video(name: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a checkpoint's answer about a pruned video, and those of transformers' own modules.

    Those get the kept rows only, at the positions of the unpruned prompt, in which the third group has no row.
    """
    frames = [drawn_image(100 + index, 112, 56) for index in range(7)]
    with tempfile.TemporaryDirectory(prefix="vsched-pruned-") as folder:
        make = make_checkpoint if name in FAMILY_SIZES else make_vision_checkpoint
        make(name, Path(folder))
        stage, model = load_on("cpu", folder), library_model(folder, sees=True)
        question = Question("what moves?", [PrunedClip(frames)], count=OUTPUTS)
        [running] = Driver(stage, chunk=5).run([question])
        whole = Clip(frames)
        ids, spans = stage.prompt(replace(question, images=[whole]))
        inputs = inputs_of(stage, model, replace(question, images=[whole]), ids)
        kept = torch.ones(len(ids), dtype=torch.bool)
        there = kept.clone()
        for ((start, stop),), mask in zip(spans, KEPT, strict=True):
            kept[start:stop] = torch.tensor([each == "1" for each in mask])
            there[start:stop] = "1" in mask
        with torch.inference_mode():
            grid = inputs[VIDEO_GRID]
            out = model.model.get_video_features(
                inputs["pixel_values_videos"], grid, return_dict=True
            )
            rows = torch.cat(list(out.pooler_output))
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            types = inputs["mm_token_type_ids"]
            embeds[types > 0] = rows
            positions, _ = model.model.get_rope_index(
                input_ids=inputs["input_ids"][:, there],
                mm_token_type_ids=types[:, there],
                video_grid_thw=grid - torch.tensor([[1, 0, 0]]),
            )
            embeds, positions = embeds[:, kept], positions[:, :, kept[there]]
            wanted: list[int] = []
            for _ in range(OUTPUTS):
                out = model.model.language_model(
                    inputs_embeds=embeds,
                    position_ids=positions,
                    attention_mask=torch.ones(embeds.shape[:2]),
                    use_cache=False,
                )
                token = model.lm_head(out.last_hidden_state[:, -1]).argmax(-1)
                wanted.append(int(token))
                embeds = torch.cat([embeds, model.get_input_embeddings()(token[None])], 1)
                after = positions[:, :, -1:].amax(0, keepdim=True).expand(3, 1, 1) + 1
                positions = torch.cat([positions, after], 2)
        return running.output, wanted


def prompt_of(stage: Stage, question: Question) -> list[int]:
    """Return the prompt as transformers' processor makes it: placeholders are replaced before tokenization."""
    front = stage.preprocessor
    if not isinstance(front, AnyPreprocessor):
        return stage.prompt(question)[0]
    processor, tokenizer = front.processor, front._tokenizer
    clips = [each for each in question.images if isinstance(each, Clip)]
    content: list[dict[str, Any]] = [
        {"type": "video" if isinstance(each, Clip) else "image"} for each in question.images
    ]
    content.append({"type": "text", "text": question.text})
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=(clips and processor.video_template) or tokenizer.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    videos = []
    for each in clips:
        plan, rules = each.plan(front), front._images.videos
        assert rules is not None
        grid = grid_in(plan.groups[0].metadata)
        grids = () if grid is None else (len(plan.groups), *grid[1:])
        seconds = [number / each.fps for number in range(len(each.frames))]
        duration = len(each.frames) / each.fps
        videos.append(processor.video_text(seconds, duration, plan.size, grids, rules.settings))
        height_and_width = each.frames[0].size[::-1]
        embedded = front.plan_embedded_video(height_and_width, seconds, frames_max=99)
        assert embedded.groups == plan.groups, "an embedded video has another prompt"
    images = [
        processor.shape(*each.size).text for each in question.images if not isinstance(each, Clip)
    ]
    (whole,), _ = processor._processor.get_text_with_replacements([text], images, videos)
    ids: list[int] = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return ids


def inputs_of(
    stage: Stage, model: Any, question: Question, ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the arguments of `generate`: the pixels of each video in one piece."""
    inner = model.model if hasattr(model, "model") else model
    requested = inspect.signature(inner.forward).parameters
    apart = hasattr(inner, "get_video_features")
    given: dict[str, list[torch.Tensor]] = {}
    for each in question.images:
        is_video = isinstance(each, Clip)
        made = video_inputs(stage, each, apart=apart) if is_video else image_inputs(stage, each)
        for key, tensor in made.items():
            given.setdefault(key, []).append(tensor)
    inputs = inputs_of_text(ids)
    inputs["mm_token_type_ids"] = types_of(stage, ids)
    for key, tensors in given.items():
        across = int(key in LISTED and not apart and len(tensors[0]) == 1)
        inputs[key] = torch.cat(tensors, across)
    return {key: tensor for key, tensor in inputs.items() if key in requested}


def types_of(stage: Stage, ids: Sequence[int]) -> torch.Tensor:
    """Return the types of tokens: 1 for an image, 2 for a video."""
    if isinstance(stage.preprocessor, AnyPreprocessor):
        own = stage.preprocessor.processor._processor
        return torch.tensor(own.create_mm_token_type_ids([list(ids)]))
    tokens, info = torch.tensor([list(ids)]), stage.info
    kinds: torch.Tensor = tokens.eq(info.placeholder).int()
    return kinds + 2 * tokens.eq(info.video_token_id or 0).int()


def video_inputs(stage: Stage, video: Clip, *, apart: bool) -> dict[str, torch.Tensor]:
    """Return the model's arguments for a video; `apart` if they are others than for images."""
    groups = video.groups(stage.preprocessor)
    metadata = groups[0][0].metadata
    own = not isinstance(stage.preprocessor, AnyPreprocessor)
    grid = grid_of(metadata) if own else grid_in(metadata)
    name = "pixel_values_videos" if apart else "pixel_values"
    if grid is None:
        frames = [frame_values(arrays) for _, arrays in groups]
        pixels = torch.cat(frames, frames[0].ndim - 4)
        return {name: pixels, "pixel_attention_mask": torch.ones_like(pixels[..., 0, :, :]).int()}
    made = {
        name: torch.cat([values_of([arrays]) for _, arrays in groups]),
        VIDEO_GRID: torch.tensor([[len(groups), *grid[1:]]]),
    }
    time = time_of(metadata) if own else None
    return made if time is None else {**made, "second_per_grid_ts": torch.tensor([time[1]])}


def grid_in(metadata: bytes) -> tuple[int, int, int] | None:
    """Return the grid of a frame group on the generic path; None without patches."""
    found = unpack_metadata(metadata).get(VIDEO_GRID)
    return None if found is None else tuple(found[0].tolist())


def frame_values(arrays: Arrays) -> torch.Tensor:
    """Return the values of a frame's pixels."""
    pixels, levels = arrays[PIXELS], arrays[LEVELS]
    channels = zip(levels, pixels.reshape(len(levels), -1), strict=True)
    values = np.stack([level[channel] for level, channel in channels])
    return torch.from_numpy(values.reshape(pixels.shape))


def image_inputs(stage: Stage, image: Image.Image) -> dict[str, torch.Tensor]:
    """Return the model's arguments for an image."""
    arrays = stage.preprocessor.process_image(image)
    metadata = stage.preprocessor.plan_image(*image.size).metadata
    if LEVELS in arrays:
        return {PIXELS: values_of([arrays]), "image_grid_thw": torch.tensor([grid_of(metadata)])}
    found = {**arrays, **unpack_metadata(metadata)}
    return {key: torch.from_numpy(np.array(array)) for key, array in found.items()}
