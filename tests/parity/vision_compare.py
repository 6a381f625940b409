"""One vision-language architecture, run over paged blocks without its tower, and compared with the whole model."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import (
    CHUNK,
    OUTPUTS,
    WHOLE,
    Expected,
    Parity,
    attention_on,
    compared,
    expected,
    inputs_of_text,
    library_model,
    load_on,
)
from tests.parity.vision_architectures import (
    END,
    IMAGE,
    START,
    VISION_ARCHITECTURES,
    Arrays,
    images_of,
    save_model,
)
from tests.workers.driver import (
    BLOCK_SIZE,
    BLOCKS,
    SLOTS,
    Question,
    Stage,
    drawn_image,
    load_encoder,
    load_generator,
)
from tests.workers.reference import Reference
from vsched.types import ArraySpec, ModelInfo, Spans
from vsched.worker.contract import ImagePlan, WorkerSettings
from vsched_workers.backends.reference.any_tower import AnyTower
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.families.generic import (
    context_tokens,
    kept_values,
    pack_metadata,
    state_bytes,
    unpack_metadata,
    vision_facts,
)

ASKED = ((0,), (1,), (2, 3), ())
"""The images of each prompt."""

PICTURES = ((60, 40), (40, 90), (84, 56), (56, 56))
"""Widths and heights of pictures for families with a path of their own."""


class MadeImages:
    """Stands in for a preprocessor: plans follow from an image's arrays and rows; its `size` is its index."""

    def __init__(self, images: Sequence[Arrays], rows: Sequence[int]) -> None:
        self.images = images
        self.rows = rows

    def plan_image(self, index: int, _height: int) -> ImagePlan:
        arrays = self.images[index]
        small = pack_metadata(arrays)
        specs = tuple(
            ArraySpec(name, str(array.dtype), array.shape)
            for name, array in arrays.items()
            if name not in unpack_metadata(small)
        )
        return ImagePlan(specs, self.rows[index], metadata=small)

    def process_image(self, image: SimpleNamespace) -> Arrays:
        arrays = self.images[image.size[0]]
        kept = unpack_metadata(self.plan_image(*image.size).metadata)
        return {name: array for name, array in arrays.items() if name not in kept}


@dataclass
class VisionStage(Stage):
    """Its prompts are tokens with the placeholders of generated images among them."""

    def prompt(self, question: Question) -> tuple[list[int], list[Spans]]:
        assert not isinstance(question.text, str)
        tokens = list(question.text)
        runs: list[Spans] = []
        start = 0
        for image in question.images:
            start = tokens.index(IMAGE, start)
            stop = start + self.preprocessor.plan_image(*image.size).tokens
            runs.append(((start, stop),))
            start = stop
        return tokens, runs


def prompts(rows: Sequence[int]) -> list[list[int]]:
    """Return the prompts: random tokens, and placeholders."""
    found = []
    for number, images in enumerate(ASKED):
        tokens = _words(5 + 9 * (not images) + number, 100 + number)
        for image in images:
            tokens += [START, *[IMAGE] * rows[image], END, *_words(4, 7 + image)]
        found.append(tokens)
    return found


def _words(count: int, seed: int) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(30, 299, (count,), generator=made).tolist()
    return found


def inputs_of_images(
    model: Any, name: str, ids: torch.Tensor, images: Sequence[Arrays], *, image_token: int = IMAGE
) -> dict[str, Any]:
    """Return the arguments that a processor would add for some images."""
    inner = model.model if hasattr(model, "model") else model
    requested = inspect.signature(inner.forward).parameters
    types = (ids == image_token).int()
    given: dict[str, Any] = {}
    if name == "paligemma":
        given["token_type_ids"] = torch.zeros_like(types)
    elif "token_type_ids" in requested:
        given["token_type_ids"] = types
    if "mm_token_type_ids" in requested:
        given["mm_token_type_ids"] = types
    if "moe_mm_token_type_ids" in requested:
        given["moe_mm_token_type_ids"] = types | ((ids == START) | (ids == END)).int()
    if not images:
        return given
    for key in images[0]:
        tensors = [torch.from_numpy(image[key]) for image in images]
        across = 1 if key == "pixel_values" and name in {"idefics3", "smolvlm"} else 0
        given[key] = torch.cat(_padded(tensors), across)
    if name == "llava_onevision" and len(images) > 1:
        given["batch_num_images"] = torch.ones(len(images), dtype=torch.int64)
    return given


def _padded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one size in all dimensions but the first: images of one batch are padded to the largest."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = []
    for tensor in tensors:
        pads: list[int] = []
        for size, wanted in zip(reversed(tensor.shape[1:]), reversed(largest), strict=True):
            pads += [0, wanted - size]
        padded.append(torch.nn.functional.pad(tensor, pads))
    return padded


def _info(path: Path, family: str) -> ModelInfo:
    facts = vision_facts(path, family)
    kept = state_bytes(facts.text, 4)
    assert kept is not None
    return ModelInfo(
        family=family,
        path=str(path),
        dtype="float32",
        hidden_size=facts.text.hidden_size,
        embedding_levels=facts.embedding_levels,
        vocab_size=facts.text.vocab_size,
        context_tokens=context_tokens(facts.text, family),
        kv_bytes_per_token=kept_values(facts.text).values * 4,
        state_bytes=kept,
        item_tokens_max=WHOLE,
        image_token_id=facts.image_token_id,
        stop_token_ids=(),
        item_atomic=facts.item_atomic,
        prompt_atomic=facts.prompt_atomic,
    )


def load_stage(path: Path, family: str, images: Any, device: str) -> VisionStage:
    """Load the parts of a checkpoint without a processor."""
    info = _info(path, family)
    settings = WorkerSettings(
        device=device, threads=1, attention=attention_on(device), slots=SLOTS, state_snapshots=SLOTS
    )
    generator = load_generator(info, settings)
    generator.build_kv(blocks=BLOCKS, block_size=BLOCK_SIZE)
    encoder = load_encoder(info, settings)
    return VisionStage(info, images, encoder, generator)


def compare_vision(name: str, *, device: str = "cpu") -> Parity:
    """Create a model of an architecture and compare with the complete model of transformers, and pixels.

    Raises:
        CheckpointError: When the architecture is refused.
    """
    with tempfile.TemporaryDirectory(prefix="vsched-vision-") as folder:
        path = Path(folder)
        save_model(name, path)
        model, images = library_model(path, sees=True), images_of(name)
        with torch.inference_mode():
            tower = AnyTower(model, torch.float32)
            made = MadeImages(images, [len(tower(image)) for image in images])
        family = VISION_ARCHITECTURES[name].family or name
        stage = load_stage(path, family, made, device)
        model = model.to(device)
        questions, wanted = [], []
        for prompt, which in zip(prompts(made.rows), ASKED, strict=True):
            shown = [SimpleNamespace(size=(index, 0)) for index in which]
            questions.append(Question(prompt, images=shown, count=OUTPUTS))
            inputs = inputs_of_text(prompt)
            ids = inputs["input_ids"]
            more = inputs_of_images(model, name, ids, [images[index] for index in which])
            wanted.append(expected(model, inputs | more))
        return compared_in_steps("generic", stage, questions, wanted)


def compare_own(name: str, *, device: str = "cpu", attention: str = "") -> Parity:
    """Compare a family with a path of its own, starting from pictures: its processing is compared, too."""
    with tempfile.TemporaryDirectory(prefix="vsched-own-") as folder:
        path = Path(folder)
        make_checkpoint(name, path)
        stage = load_on(device, folder, attention)
        pictures = [drawn_image(seed, *size) for seed, size in enumerate(PICTURES)]
        questions = [
            Question(f"what is {number}?", [pictures[index] for index in which], count=OUTPUTS)
            for number, which in enumerate(ASKED)
        ]
        reference = Reference(path, device)
        wanted = [
            expected(reference.model, reference.inputs(stage.prompt(each)[0], each.images))
            for each in questions
        ]
        return compared_in_steps(describe_checkpoint(folder).path, stage, questions, wanted)


def compared_in_steps(
    path: str, stage: Stage, questions: Sequence[Question], wanted: Sequence[Expected]
) -> Parity:
    """Compare, with preemptions so rare that each request advances between two."""
    preempts = 5 + max(len(stage.prompt(each)[0]) for each in questions) // CHUNK
    return compared(path, stage, questions, wanted, preempts=preempts)
