"""Real processes for the ranks of a group: one executor per rank, each with one long-lived process."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.patience import PATIENCE_S
from tests.workers.driver import PAGES, ROWS_A_PAGE, Driver, Question, Stage, outputs
from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, WorkerSettings
from vsched_workers.checkpoint.random_init import SIZES, make_checkpoint
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.plugin import RANK_MODULES

T = TypeVar("T")


def forkable_everywhere() -> list[str]:
    """Return the imports of ranks of the families that most tests use, to preload before forks."""
    families = ("qwen2_5_vl", "qwen3_vl")
    return [*RANK_MODULES, *(f"transformers.models.{name}.modeling_{name}" for name in families)]


class Ranks:
    """Runs a function as every rank of a group at once."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *forkable_everywhere()])
        self._folder = folder
        self._numbers = itertools.count()
        self._executors = [
            ProcessPoolExecutor(
                1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
            )
            for _ in range(size)
        ]

    def run(self, function: Callable[..., T], *arguments: object, size: int = 2) -> list[T]:
        """Call `function(settings, *arguments)` as each rank; return the results in order."""
        path = self._folder / f"group-{next(self._numbers)}"
        started: list[Future[T]] = [
            executor.submit(
                function,
                WorkerSettings(threads=1, ranks=size, rank=rank, rendezvous=str(path)),
                *arguments,
            )
            for rank, executor in enumerate(self._executors[:size])
        ]
        # Report a rank that raises at once: the others may wait for it.
        done, _ = wait(started, timeout=PATIENCE_S, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()
        return [each.result(timeout=0) for each in started]

    def stop(self) -> None:
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)


def shared_embeddings(settings: WorkerSettings, info: ModelInfo) -> npt.NDArray[np.uint8]:
    """Return memory that all ranks of a group share, like the arena."""
    shape = (PAGES, ROWS_A_PAGE, info.embedding_row_bytes)
    path = Path(f"{settings.rendezvous}-arena")
    with path.open("ab") as file:
        # numpy extends an empty file by a byte to map it; another rank must not truncate it again.
        file.truncate(max(1, PAGES * ROWS_A_PAGE * info.embedding_row_bytes))
    return np.memmap(path, dtype=np.uint8, mode="r+", shape=shape)


def load(
    settings: WorkerSettings, path: str, dtype: str = "float32", kv_dtype: str = "auto"
) -> Stage:
    return Stage.load(path, attention="exact", dtype=dtype, settings=settings, kv_dtype=kv_dtype)


def driver_of(settings: WorkerSettings, stage: Stage, chunk: int) -> Driver:
    """Return a driver, which shares the embeddings of images with other ranks if there are any."""
    shares = settings.rendezvous and stage.info.takes_images
    embeddings = shared_embeddings(settings, stage.info) if shares else None
    return Driver(stage, chunk=chunk, seed=chunk, embeddings=embeddings)


def answer(
    settings: WorkerSettings,
    path: str,
    questions: Sequence[Question],
    dtype: str = "float32",
    kv_dtype: str = "auto",
) -> tuple[list[list[int]], npt.NDArray[np.uint8], dict[str, int]]:
    """Run questions to completion; return the tokens, all embeddings, and the bytes of both stages' weights."""
    stage = load(settings, path, dtype, kv_dtype)
    driver = driver_of(settings, stage, 40)
    running = driver.run(questions, arrivals=2, preempts=7)
    held = {"encode": stage.encoder.weights_bytes, "generate": stage.generator.weights_bytes}
    return outputs(running), np.array(driver.embeddings), held


def answer_text(
    settings: WorkerSettings, path: str, questions: Sequence[Question], dtype: str = "float32"
) -> list[list[int]]:
    """Run questions of a text model to completion; return the tokens."""
    driver = driver_of(settings, load(settings, path, dtype), 7)
    return outputs(driver.run(questions, arrivals=2, preempts=7))


def encode_in_parts(
    settings: WorkerSettings, path: str, question: Question, fails: str
) -> tuple[str, bool]:
    """Encode an image layer by layer, with a step of the language model after each; the first rank may fail.

    On an early failure, the other rank waits in its next layer and is advanced to the end. Returns the error, and
    whether a following batch has the same rows as one encoded at once, with unchanged tokens in the steps.
    """
    stage = load(settings, path)
    driver = driver_of(settings, stage, 40)
    expected = outputs(driver.run([question]))
    encoder = stage.encoder
    assert encoder.pauses
    image = question.images[0]
    plan = stage.preprocessor.plan_image(*image.size)
    pages = list(range(-(-plan.tokens // ROWS_A_PAGE)))
    failing = fails if settings.rank == 0 else ""
    tokens = plan.tokens - (failing == "at the end")
    arrays = stage.preprocessor.process_image(image)
    whole, found = np.zeros_like(driver.embeddings), np.zeros_like(driver.embeddings)

    def work() -> None:
        encoder.begin([EncodeJob(b"", tokens, arrays, plan.metadata, pages)], found)
        layers = 1
        while not encoder.advance(layers):
            assert outputs(driver.run([question])) == expected
            if failing == "early":
                encoder.begin([], found)  # drops the batch
                raise ValueError
            layers = 0 if fails == "early" else 1

    error = outcome(work)
    job = EncodeJob(b"", plan.tokens, arrays, plan.metadata, pages)
    encoder.encode([job], whole)
    if error:
        found[:] = whole if settings.rank else 0
        encoder.begin([job], found)
        assert encoder.advance(0)
    return error, bool(np.array_equal(found, whole)) and whole.any() == (settings.rank == 0)


def outcome(call: Callable[[], Any]) -> str:
    """Return the name and the message of a call's exception; empty if there is none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the tests look at it
        return f"{type(error).__name__}: {error}"
    return ""


def enter(group: RankGroup) -> None:
    """Run one collective operation."""
    with group.together():
        group.all_reduce(torch.ones(1))


def make_four_heads(path: Path, size: str, dtype: str = "float32") -> Path:
    """Write a checkpoint like one of the named sizes, with four KV heads and four vision heads; return its folder.

    Its vocabulary is not divisible by four, so every rank has the whole head. Its biases are random: errors in slicing
    and summing zeros would not be seen.
    """
    known = SIZES[size]
    text = known.text | {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
    vision = known.vision | {"num_heads": 4}
    if size == "nano25":
        text |= {"hidden_size": 128}
        vision |= {"hidden_size": 64}
    vision |= {"out_hidden_size": text["hidden_size"]}
    four = dataclasses.replace(known, vocab=390, text=text, vision=vision)
    with mock.patch.dict(SIZES, four=four):
        make_checkpoint(str(path), "four", dtype=dtype)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in weights if name.endswith(".bias")]:
        weights[name] = torch.randn_like(weights[name]) / 4
    save_file(weights, path / "model.safetensors")
    return path
