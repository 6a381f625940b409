"""One family in one data type: a small random checkpoint, served by a real engine, compared with `generate`."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.bench.gpu.family_rows import FamilyRow, Outcome
from tests.bench.gpu.serve import settings_of
from tests.e2e.asking import GREEDY, TEXTS, Answer, Ask, begin, drawn_image, read
from tests.parity.architectures import FAMILY_SIZES, make_checkpoint
from tests.parity.vision_checkpoints import PROCESSING, make_vision_checkpoint
from tests.parity.vision_compare import inputs_of_images
from tests.patience import until
from tests.workers.reference import Reference
from vsched import Engine
from vsched.config import load_config
from vsched.logs import configure_logging
from vsched.worker.contract import Preprocessor
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.families.generic import unpack_metadata
from vsched_workers.plugin import plugin

TOKENS, TOKENS_KILLED = 32, 64
"""Output tokens of requests, and of those whose rank is killed."""
TOKENS_BEFORE = 12
"""Output tokens of all requests before the kill."""
SETTINGS = (
    "encode.threads=1",
    "generate.threads=1",
    "generate.slots=8",
    "generate.chunk_tokens=48",
    "generate.max_batch_tokens=256",
    "generate.context_tokens=512",
    'generate.memory={use="pinned", tokens=4096}',
    "arena.pixel_bytes=33554432",
    "arena.embedding_bytes=8388608",
    "media.threads=1",
)
QUESTIONS = (
    Ask(TEXTS[0], [drawn_image(1)]),
    Ask(TEXTS[1], [drawn_image(2, (33, 64)), drawn_image(3, (112, 40))]),
    Ask(TEXTS[2], []),
    Ask(TEXTS[4], [drawn_image(1), drawn_image(4, (64, 40))]),
)

Expected = tuple[list[int], torch.Tensor]
"""Tokens of `generate`, and the logits of each."""


class TextQuestion(Ask):
    """A request to a model of text alone, whose template takes a string."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]


class GenericReference(Reference):
    """Transformers' model of a family without a path of its own; image arrays are the preprocessor's."""

    def __init__(
        self,
        family: str,
        path: Path,
        preprocessor: Preprocessor,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self._family = family
        self._preprocessor = preprocessor
        sees = preprocessor.info.takes_images
        made: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.model = made.from_pretrained(path, dtype=dtype).eval().to(device)
        self.device = device

    def inputs(self, prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
        ids = torch.tensor([list(prompt)])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        info = self._preprocessor.info
        if info.takes_images:
            arrays = [self._arrays(image) for image in images]
            inputs |= inputs_of_images(
                self.model, self._family, ids, arrays, image_token=info.placeholder
            )
        return {
            name: each.to(self.device, self.model.dtype if each.is_floating_point() else each.dtype)
            for name, each in inputs.items()
        }

    def _arrays(self, image: Image.Image) -> dict[str, Any]:
        plan = self._preprocessor.plan_image(*image.size)
        small = {name: array.copy() for name, array in unpack_metadata(plan.metadata).items()}
        arrays = {**self._preprocessor.process_image(image), **small}
        # Processors also return counts of tiles, which only the prompt depends on.
        taken = inspect.signature(self.model.forward).parameters
        return {name: array for name, array in arrays.items() if name in taken}


def run_family(
    family: str, dtype: str, folder: Path, device: str, log: Path, *, kills: bool
) -> None:
    """Compare in this process, with output to `log`; `row.json` in the folder has the result so far at any time.

    With `kills`, a rank is killed as well.
    """
    with log.open("wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    configure_logging("engine")
    row = FamilyRow(family=family, dtype=dtype)
    began_s = time.monotonic()

    def save() -> None:
        row.seconds = round(time.monotonic() - began_s, 1)
        (folder / "row.new").write_bytes(msgspec.json.encode(row))
        (folder / "row.new").replace(folder / "row.json")

    try:
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = False  # as in vsched; torch allows it for convolutions
        path = folder / "checkpoint"
        write = make_vision_checkpoint if family in PROCESSING else make_checkpoint
        write(family, path)
        row.path = describe_checkpoint(str(path)).path
        asyncio.run(_compare(row, path, device, save, kills=kills))
    except Exception as error:  # noqa: BLE001 - any error is this family's result
        traceback.print_exc()
        row.outcome, row.error = "failed", f"{type(error).__name__}: {error}"
    save()


async def _compare(
    row: FamilyRow, path: Path, device: str, save: Callable[[], None], *, kills: bool
) -> None:
    info = plugin.inspect(str(path), dtype=row.dtype, item_tokens_max=0)
    preprocessor = plugin.load_preprocessor(info)
    asks = [each if info.takes_images else TextQuestion(each.text) for each in QUESTIONS]
    count = TOKENS_KILLED if kills else TOKENS

    def generate() -> list[Expected]:
        dtype = getattr(torch, row.dtype)
        reference = (
            Reference(path, device, dtype)
            if row.family in FAMILY_SIZES
            else GenericReference(row.family, path, preprocessor, device, dtype)
        )
        prompts = [ask.prompt(preprocessor) for ask in asks]
        return [
            reference.generate_with_logits(prompt, ask.images, count, pad_token_id=0)
            for prompt, ask in zip(prompts, asks, strict=True)
        ]

    sets = [*SETTINGS, *settings_of(device), f"model.path={path}", f"model.dtype={row.dtype}"]
    began_s = time.monotonic()
    generating = asyncio.create_task(asyncio.to_thread(generate))  # the rank imports for seconds
    async with Engine(load_config(None, sets=sets, environ={}).config) as engine:
        row.ready_s = round(time.monotonic() - began_s, 1)
        save()
        expected = await generating
        found = compared(await _answers(engine, asks, TOKENS), expected)
        row.outcome, row.difference, row.gaps = found
        save()
        if kills:
            lose = partial(os.kill, engine.rank_pids[0], signal.SIGKILL)
            after = compared(await _answers(engine, asks, count, lose), expected)
            row.killed = after.outcome
            if after.gaps and not found.gaps:
                row.difference = f"after the kill {after.difference}"


async def _answers(
    engine: Engine, asks: Sequence[Ask], count: int, disturb: Callable[[], None] | None = None
) -> list[list[int]]:
    """Return the tokens of all requests, which run at once; `disturb` is called while they run."""
    sampling = msgspec.structs.replace(GREEDY, max_tokens=count)
    started = [await begin(engine, ask, sampling) for ask in asks]
    if disturb is not None:
        await until(lambda: sum(one.output_tokens for one in started) >= TOKENS_BEFORE, "they run")
        disturb()
    found: list[Answer] = await asyncio.gather(*(read(one) for one in started))
    return [each.token_ids for each in found]


class Comparison(NamedTuple):
    """Comparison of tokens; `gaps` are those of the logits of each first differing token."""

    outcome: Outcome
    difference: str
    gaps: list[float]


def compared(found: Sequence[Sequence[int]], expected: Sequence[Expected]) -> Comparison:
    """Return the comparison, with the first differing token of each request."""
    differences, gaps = [], []
    for number, (tokens, (wanted, logits)) in enumerate(zip(found, expected, strict=True)):
        at = next((at for at, token in enumerate(tokens) if token != wanted[at]), None)
        if at is not None:
            gaps.append(float(logits[at, wanted[at]] - logits[at, tokens[at]]))
            differences.append(
                f"request {number} token {at}: {tokens[at]}, not {wanted[at]}, {gaps[-1]:.2g} apart"
            )
    return Comparison("differs" if gaps else "equal", "; ".join(differences), gaps)
