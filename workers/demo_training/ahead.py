"""Generation of the next step's batch in a separate process during the current step.

Drawing takes one core a sixth of a step, and training seldom keeps two cores busy. A step's batch is a function of the
plan and its number alone, regardless of the process that draws it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import load, save

from demo_training.batches import TrainingBatch
from vsched.errors import VschedError

DEADLINE_S = 300.0
"""A process that imports torch on a busy machine takes a while before its first batch."""
END_S = 5.0


class DrawnAhead:
    """Batches by step, each drawn during the step before.

    Use as a context manager: the process ends with it.

    Args:
        start: Called once in that process: returns the function that makes a step's batch. Must be picklable.
    """

    def __init__(self, start: Callable[[], Callable[[int], TrainingBatch]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # A daemon, so that nothing waits for it when this process ends; it ends when the pipe is closed.
        self._process = context.Process(target=_draw, args=(theirs, start), daemon=True)
        self._process.start()
        theirs.close()
        self._requested: int | None = None

    def __call__(self, step: int) -> TrainingBatch:
        """Return the batch of a step.

        Raises:
            VschedError: When the process has died, or has drawn nothing for minutes.
        """
        try:
            if self._requested != step:
                if self._requested is not None:
                    self._receive()
                self._pipe.send_bytes(str(step).encode())
            drawn = self._receive()
            self._requested = step + 1
            self._pipe.send_bytes(str(self._requested).encode())
        except (EOFError, OSError) as error:
            raise VschedError(
                "the process that draws has ended; see what it wrote above"
            ) from error
        return decode_batch(drawn)

    def _receive(self) -> bytes:
        if not self._pipe.poll(DEADLINE_S):
            raise VschedError(f"no sample was drawn for {DEADLINE_S:g} s")
        return self._pipe.recv_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(END_S)


def _draw(pipe: Any, start: Callable[[], Callable[[int], TrainingBatch]]) -> None:
    """Send the batch for each step number that is received, until the pipe is closed."""
    torch.set_num_threads(1)
    make = start()
    while True:
        try:
            step = int(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(encode_batch(make(step)))


def encode_batch(batch: TrainingBatch) -> bytes:
    """Encode a batch as safetensors; a tensor's name is the path of its fields."""
    return save({name: tensor.contiguous() for name, tensor in _tensors("", batch)})


def decode_batch(content: bytes) -> TrainingBatch:
    """Decode the result of `encode_batch`."""
    batch: TrainingBatch = _made(TrainingBatch, "", load(content))
    return batch


def _tensors(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, tuple):
        for index, inner in enumerate(part):
            yield from _tensors(f"{name}.{index}", inner)
    else:
        for field in dataclasses.fields(part):
            yield from _tensors(f"{name}.{field.name}", getattr(part, field.name))


def _made(kind: Any, name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    if kind is torch.Tensor:
        return tensors[name]
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        started = {
            known.removeprefix(f"{name}.").partition(".")[0]
            for known in tensors
            if known.startswith(f"{name}.")
        }
        return tuple(_made(inner, f"{name}.{index}", tensors) for index in range(len(started)))
    hints = get_type_hints(kind, localns={"torch": torch})
    return kind(**{field: _made(hint, f"{name}.{field}", tensors) for field, hint in hints.items()})
