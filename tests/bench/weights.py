"""`python -m tests.bench.weights CHECKPOINT`: effect of quantized weights, activations and KV cache on logits.

Both models are fed the same exam questions, and the tokens of the quantized model.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
from typing import NamedTuple

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from tests.workers.backends.cpu.twins import Twins
from tests.workers.driver import Driver, Question, Stage
from vsched.worker.contract import WorkerSettings
from vsched_workers.plugin import TransformersPlugin

FORMATS = (("int8", 128), ("int8", 32), ("int4", 128), ("int4", 32))
QUESTIONS = 40
"""Per task."""
ANSWER_TOKENS = 12


class Effect(NamedTuple):
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
    path: str, kind: str, group: int, *, activations: str = "float", kv_dtype: str = "auto"
) -> Effect:
    """Run the first questions of all exam tasks; both models are fed the quantized model's output."""
    settings = WorkerSettings(threads=1, weights=kind, weights_group=group, activations=activations)
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
    return Effect(float(apart), float(same), right, requested)


def logits_table(path: str) -> Table:
    """Return the difference of logits from those of unquantized weights, and the number of right answers."""
    table = Table("weights", "logits apart", "same first choice", "right answers", title=path)
    lines = [("as they are", ask(path, "auto", 0))]
    lines.append(("as they are, KV int8", ask(path, "auto", 0, kv_dtype="int8")))
    for kind, group in FORMATS:
        for activations, suffix in (("float", ""), ("int8", ", rows int8")):
            reported = ask(path, kind, group, activations=activations)
            lines.append((f"{kind}, {group}{suffix}", reported))
    for name, (apart, same, right, requested) in lines:
        shares = (f"{100 * share:.2f} %" for share in (apart, same))
        table.add_row(name, *shares, f"{right} of {requested}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights")
    parser.add_argument("checkpoint")
    given = parser.parse_args()
    Console(width=150).print(logits_table(given.checkpoint))


if __name__ == "__main__":
    main()
