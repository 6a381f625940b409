"""Answers about videos, compared with `generate` for the whole video and the text of transformers' own processor."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.parity.architectures import FAMILY_SIZES, make_checkpoint
from tests.parity.compare import OUTPUTS, Expected, Parity, attention_on, reported_by
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.parity.vision_compare import compared
from tests.workers.driver import Clip, Question, Stage, drawn_image, values_of
from vsched.worker.contract import Arrays, ImagePlan, WorkerSettings
from vsched_workers.checkpoint.preprocess import AnyPreprocessor
from vsched_workers.families.generic_vision import VIDEO_GRID, unpack_metadata
from vsched_workers.families.qwen_image import LEVELS, PIXELS, grid_of, time_of

SIDES = (60, 40)
"""Width and height of frames and images."""


def clip(seed: int, frames: int, fps: float = 2.0) -> Clip:
    """Return a video of different frames."""
    return Clip([drawn_image(100 * seed + index, *SIDES) for index in range(frames)], fps)


UNMIXED = ("glm4v", "glm4v_moe")
"""Architectures for which transformers does not mix images and videos in a prompt."""


def questions(name: str) -> list[Question]:
    """Return questions about one long video, an image and a video, two videos, and none."""
    long, short = clip(1, 7), clip(2, 4)
    other = clip(3, 4)
    image = [] if name in UNMIXED else [drawn_image(7, *SIDES)]
    return [
        Question("what comes first?", [long], count=OUTPUTS),
        Question("is this in it?", [*image, short], count=OUTPUTS),
        Question("compare", [short, other], count=OUTPUTS),
        Question("who are you?", count=OUTPUTS),
    ]


def compare_video(name: str, *, device: str = "cpu") -> Parity:
    """Create a checkpoint of an architecture and compare."""
    with tempfile.TemporaryDirectory(prefix="vsched-video-") as folder:
        path = Path(folder)
        if name in FAMILY_SIZES:
            make_checkpoint(name, path)
        else:
            make_vision_checkpoint(name, path)
        stage = Stage.load(
            folder,
            attention=attention_on(device),
            dtype="float32",
            settings=WorkerSettings(threads=1, device=device),
        )
        made: Any = AutoModelForImageTextToText
        model = made.from_pretrained(path, dtype=torch.float32).eval().to(device)
        asked = questions(name)
        expected = []
        for question in asked:
            ids = prompt_of(stage, question)
            assert stage.prompt(question)[0] == ids, "the prompt differs from transformers'"
            inputs = {
                key: tensor.to(device) for key, tensor in inputs_of(stage, model, question, ids).items()
            }
            with torch.inference_mode():
                out = model.generate(
                    **inputs,
                    max_new_tokens=OUTPUTS,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            expected.append(Expected(out[0, len(ids) :].tolist(), reported_by(model, **inputs)))
        kind = "generic" if name not in FAMILY_SIZES else FAMILY_PATHS[name]
        return compared(kind, stage, asked, expected)


FAMILY_PATHS = {"qwen2_5_vl": "fused", "qwen3_vl": "fused", "qwen3_vl_moe": "modules"}


def prompt_of(stage: Stage, question: Question) -> list[int]:
    """Return the prompt as transformers' processor makes it: texts are put in before all is tokenized."""
    preprocessor = stage.preprocessor
    if not isinstance(preprocessor, AnyPreprocessor):
        return stage.prompt(question)[0]
    own = preprocessor.processor
    content = [
        {"type": "video" if isinstance(each, Clip) else "image"} for each in question.images
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
    template = own.video_template or preprocessor._tokenizer.chat_template
    tokenizer = preprocessor._tokenizer
    has_video = any(isinstance(each, Clip) for each in question.images)
    text = tokenizer.apply_chat_template(
        messages,
        chat_template=template if has_video else tokenizer.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    images, videos = [], []
    for each in question.images:
        if isinstance(each, Clip):
            plan = each.plan(preprocessor)
            facts = each.facts
            grid = unpack_metadata(plan.groups[0].metadata).get(VIDEO_GRID)
            rules = preprocessor._images.videos
            assert rules is not None
            numbers = list(range(len(each.frames)))
            videos.append(
                own.video_text(
                    facts,
                    numbers,
                    plan.size,
                    () if grid is None else (len(plan.groups), *grid[0, 1:]),
                    rules.settings,
                )
            )
        else:
            images.append(own.shape(*each.size).text)
    (text,), _ = own._processor.get_text_with_replacements([text], images, videos)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def inputs_of(
    stage: Stage, model: Any, question: Question, ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the arguments of `generate`: the pixels of each video in one piece."""
    preprocessor = stage.preprocessor
    inner = model.model if hasattr(model, "model") else model
    requested = inspect.signature(inner.forward).parameters
    own = hasattr(inner, "get_video_features")
    given: dict[str, list[torch.Tensor]] = {}

    def add(key: str, tensor: torch.Tensor) -> None:
        given.setdefault(key, []).append(tensor)

    for each in question.images:
        if isinstance(each, Clip):
            groups = each.groups(preprocessor)
            pixels = [video_values(arrays, plan) for plan, arrays in groups]
            name = "pixel_values_videos" if own else "pixel_values"
            grids = [video_grid(plan) for plan, _ in groups]
            if grids[0] is None:
                across = pixels[0].ndim - 4
                add(name, torch.cat(pixels, across))
                if "pixel_attention_mask" in requested:
                    add("pixel_attention_mask", torch.ones_like(given[name][-1][..., 0, :, :]).int())
                continue
            add(name, torch.cat(pixels))
            add("video_grid_thw", torch.tensor([[len(grids), *grids[0][1:]]]))
            time = time_of(groups[0][0].metadata) if name_of_family(stage) else None
            if time is not None:
                add("second_per_grid_ts", torch.tensor([time[1]]))
            continue
        for key, tensor in image_values(preprocessor, each).items():
            add(key, tensor)
    inputs = {"input_ids": torch.tensor([list(ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for key, tensors in given.items():
        across = int(key in {"pixel_values", "pixel_attention_mask"} and not own and len(tensors[0]) == 1)
        if key in requested:
            inputs[key] = torch.cat(tensors, max(across, 0))
    if "mm_token_type_ids" in requested:
        inputs["mm_token_type_ids"] = types_of(stage, ids)
    return inputs


def name_of_family(stage: Stage) -> bool:
    """Return whether the model has a path of its own."""
    return not isinstance(stage.preprocessor, AnyPreprocessor)


def types_of(stage: Stage, ids: Sequence[int]) -> torch.Tensor:
    """Return the types of tokens: 1 for an image, 2 for a video."""
    preprocessor = stage.preprocessor
    if isinstance(preprocessor, AnyPreprocessor):
        made = preprocessor.processor._processor.create_mm_token_type_ids([list(ids)])
        return torch.tensor(made)
    tokens = torch.tensor([list(ids)])
    info = stage.info
    return (tokens == info.image_token_id).int() + 2 * (tokens == info.video_token_id).int()


def video_grid(plan: ImagePlan) -> Sequence[int] | None:
    """Return the grid of a frame group."""
    try:
        found = unpack_metadata(plan.metadata).get(VIDEO_GRID)
    except Exception:
        return grid_of(plan.metadata)
    return None if found is None else [int(each) for each in found[0]]


def video_values(arrays: Arrays, plan: ImagePlan) -> torch.Tensor:
    """Return the pixel values of a frame group."""
    if video_grid(plan) is not None:
        return values_of([arrays])
    pixels, levels = arrays[PIXELS], arrays[LEVELS]
    flat = pixels.reshape(3, -1)
    values = np.stack([level[channel] for level, channel in zip(levels, flat, strict=True)])
    return torch.from_numpy(values.reshape(pixels.shape))


def image_values(preprocessor: Any, image: Image.Image) -> dict[str, torch.Tensor]:
    """Return the model's arguments for an image."""
    arrays = preprocessor.process_image(image)
    plan = preprocessor.plan_image(*image.size)
    if LEVELS in arrays:
        grid = torch.tensor([grid_of(plan.metadata)])
        return {PIXELS: values_of([arrays]), "image_grid_thw": grid}
    small = unpack_metadata(plan.metadata)
    return {key: torch.from_numpy(np.array(each)) for key, each in {**arrays, **small}.items()}
