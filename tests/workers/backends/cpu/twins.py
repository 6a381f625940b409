"""Twin models that compute the same batches: transformers' modules and fused layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.workers.driver import Driver, Question, Stage
from tests.workers.parallel.ranks import driver_of
from vsched.worker.contract import Batch, GenerateWorker, Sampled, SequenceState, WorkerSettings
from vsched.worker.memory import DeviceMemory

WITHIN = 0.05
"""Maximum difference of a logit, as a share of the maximum: a few roundings to 8 bits."""


class Twins(GenerateWorker):
    """Two generators with the same batches, their hidden states and logits; the tokens of the first one are used."""

    def __init__(self, first: Any, second: Any) -> None:
        self._pair = (first, second)
        self.weights_bytes = first.weights_bytes
        self.hidden: list[list[torch.Tensor]] = [[], []]
        self.logits: list[list[torch.Tensor]] = [[], []]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair[0], name)

    def device_memory(self) -> DeviceMemory:
        memory: DeviceMemory = self._pair[0].device_memory()
        return memory

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        self._pair[0].build_kv(blocks=blocks, block_size=block_size, touch=touch)

    def drop_kv(self) -> None:
        self._pair[0].drop_kv()

    def prepare(self, sequence: SequenceState) -> None:
        self._pair[0].prepare(sequence)

    def step(self, batch: Batch) -> Sampled:
        sampled: list[Sampled] = []
        for generator, hidden, logits in zip(self._pair, self.hidden, self.logits, strict=True):
            with watched(generator, hidden, logits):
                sampled.append(generator.step(batch))
        rows = len(sampled[0].tokens)
        for kept in (*self.hidden, *self.logits):
            if rows:
                kept[-1] = kept[-1][:rows]
        return sampled[0]

    @property
    def apart(self) -> float:
        """Distance of the logits relative to their size, both as root mean squares."""
        one, other = (torch.cat(each).float() for each in self.logits)
        return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())

    def check(self) -> None:
        """Check that logits are equal except for rounding, and tokens too unless the choice is close."""
        wanted, found = (torch.cat(each).float() for each in self.logits)
        assert wanted.shape == found.shape
        scale = wanted.abs().amax(-1)
        apart = (wanted - found).abs().amax(-1)
        assert (apart < WITHIN * scale).all()
        top = wanted.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * apart
        assert clear.sum() > 10
        assert torch.equal(wanted.argmax(-1)[clear], found.argmax(-1)[clear])


def run_both(
    first: Stage,
    second: Stage,
    questions: Sequence[Question],
    *,
    chunk: int = 30,
    seed: int = 0,
    **options: int,
) -> Twins:
    """Run questions by one stage, with the batches of its generator repeated by that of another."""
    twins = Twins(first.generator, second.generator)
    stage = dataclasses.replace(first, generator=twins)
    Driver(stage, chunk=chunk, seed=seed).run(questions, **options)
    return twins


@contextmanager
def watched(generator: Any, inputs: list[torch.Tensor], kept: list[torch.Tensor]) -> Iterator[None]:
    """Keep what the head of a model is given, and its logits."""
    head = generator._head

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = head(hidden)
        inputs.append(hidden.clone())
        kept.append(logits.clone())
        return logits

    generator._head = watch
    try:
        yield
    finally:
        generator._head = head


def run_twins(
    settings: WorkerSettings, path: str, questions: Sequence[Question]
) -> list[list[float]]:
    """Run questions as one rank of a group, check them, and return some hidden states of the fused layers."""
    load = functools.partial(Stage.load, path, dtype="bfloat16", settings=settings)
    stages = [
        load(attention=kind, rendezvous=f"{settings.rendezvous}-{kind}")
        for kind in ("exact", "auto")
    ]
    twins = Twins(*(stage.generator for stage in stages))
    stage = dataclasses.replace(stages[0], generator=twins)
    driver_of(settings, stage, 40).run(questions, arrivals=2, preempts=7)
    twins.check()
    hidden: list[list[float]] = torch.cat(twins.hidden[1])[:, :8].tolist()
    return hidden
