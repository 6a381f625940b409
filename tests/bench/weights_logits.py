"""Effect of quantized weights, activations or KV cache on logits: both models are fed the same questions and tokens."""

from __future__ import annotations

import dataclasses
import io
from typing import NamedTuple

import torch
from PIL import Image

from tests.workers.backends.cpu.twins import Twins
from tests.workers.driver import Driver, Question, Stage
from vsched.worker.contract import WorkerSettings
from vsched_workers.plugin import TransformersPlugin

QUESTIONS = 40
"""Per task."""
ANSWER_TOKENS = 12


class Told(NamedTuple):
    """Results of a quantized checkpoint.

    Attributes:
        apart: Difference of logits relative to their size, both as root mean squares.
        same: Share of tokens on which both models agree.
        right: Number of right answers out of `requested`.
    """

    apart: float
    same: float
    right: int
    requested: int


def ask(
    path: str,
    kind: str,
    group: int,
    *,
    activations: str = "float",
    kv_dtype: str = "auto",
    calibration: str = "",
) -> Told:
    """Run the first questions of all exam tasks; both models are fed the quantized model's output."""
    settings = WorkerSettings(
        threads=1,
        weights=kind,
        weights_group=group,
        calibration=calibration,
        activations=activations,
    )
    plain = Stage.load(path, attention="auto", dtype="float32")
    made = Stage.load(path, attention="auto", dtype="float32", settings=settings, kv_dtype=kv_dtype)
    twins = Twins(made.generator, plain.generator)
    plugin, right, requested = TransformersPlugin(), 0, 0
    for task in plugin.exam_tasks():
        for turn, *_ in plugin.exam(task, QUESTIONS, seed=1):
            images = [Image.open(io.BytesIO(image)) for image in turn.images]
            question = Question(turn.question, images, count=ANSWER_TOKENS)
            stage = dataclasses.replace(made, generator=twins)
            (answered,) = Driver(stage, chunk=256).run([question])
            sequence, wanted = answered.sequence, made.preprocessor.tokenize(turn.answer)
            found = sequence.tokens[sequence.prompt_length :].tolist()
            right += found[: len(wanted)] == list(wanted)
            requested += 1
    one, other = (torch.cat(each) for each in twins.logits)
    apart = (one - other).square().mean().sqrt() / other.square().mean().sqrt()
    same = (one.argmax(-1) == other.argmax(-1)).float().mean()
    return Told(float(apart), float(same), right, requested)
