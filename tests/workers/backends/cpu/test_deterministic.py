"""`deterministic`: the result of a row is the same to the bit for any batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import prompts
from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import needs_bf16_dot
from tests.workers.driver import (
    Checkpoints,
    Driver,
    Question,
    Running,
    Stage,
    drawn_image,
    encode_jobs,
    reported,
)
from tests.workers.parallel.ranks import Ranks, driver_of, make_four_heads
from vsched.errors import ConfigError
from vsched.types import SamplingParams
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu import attention, products
from vsched_workers.plugin import TRAINED

Load = Callable[..., Stage]
load_kernels = functools.partial(Stage.load, attention="auto", dtype="bfloat16", deterministic=True)

CHUNKS = (1000, 7, 64)


@pytest.fixture(scope="module")
def load(checkpoints: Checkpoints) -> Load:
    @functools.cache
    def stage(name: str, threads: int = 1, *, deterministic: bool = True) -> Stage:
        path = TRAINED if name == "demo" else checkpoints(name)
        return load_kernels(path, threads=threads, deterministic=deterministic)

    return stage


SAMPLING = SamplingParams(temperature=0.0, logprobs=4)


def asked(text: str | Sequence[int], images: Sequence[Any] = (), count: int = 12) -> Question:
    return Question(text, images, count, SAMPLING)


def questions(count: int) -> list[Question]:
    kinds = [
        asked("What is in the picture?", [drawn_image(1, 90, 61)]),
        asked("Why? " * 6),
        asked("Compare these two.", [drawn_image(2, 56, 84), drawn_image(3, 30, 30)]),
    ]
    return kinds[:count] + [asked(f"{n}?" * (1 + n % 3), count=8) for n in range(3, count)]


def run(
    stage: Stage, requested: Sequence[Question], *, chunk: int = 1000, seed: int = 0, **options: int
) -> list[tuple[list[int], str]]:
    return reported(Driver(stage, chunk=chunk, seed=seed).run(requested, **options))


@needs_bf16_dot
@pytest.mark.parametrize(("name", "threads"), [("demo", 2), ("nano25", 2), ("nano3", 1)])
def test_logits_are_the_same_alone_among_others_in_any_chunks_and_recomputed(
    load: Load, name: str, threads: int
) -> None:
    stage, requested = load(name, threads), questions(32)
    together = run(stage, requested, chunk=40, seed=3)
    assert [run(stage, [requested[n]])[0] for n in range(6)] == together[:6]
    for chunk in CHUNKS:
        assert run(stage, requested[:4], chunk=chunk, seed=chunk) == together[:4]
    # A preempted request is recomputed from prompt and output, as after the loss of its rank.
    assert run(stage, requested[:6], chunk=40, arrivals=1, preempts=4) == together[:6]


@needs_bf16_dot
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_of_text_alone_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """For decoder-only models of any family: alone in one chunk, or in a batch with small chunks, preempted.

    gemma2 has sliding windows and soft-capping.
    """
    make_checkpoint(name, tmp_path)
    stage = load_kernels(tmp_path)
    requested = [asked(prompt, count=8) for prompt in prompts()]
    together = run(stage, requested, chunk=7, arrivals=1, preempts=4)
    assert [run(stage, [each])[0] for each in requested] == together


@needs_bf16_dot
@pytest.mark.parametrize("threads", [1, 2])
def test_borders_of_chunks_leave_no_trace(load: Load, threads: int) -> None:
    """Chunks end within and at the ends of blocks of keys, and of images; some are one row."""
    stage = load("demo", threads)
    long = asked("Which one? " * 40, [drawn_image(1, 200, 180)], 4)
    assert len(stage.prompt(long)[0]) > 260
    for chunk in (1, 13, 129):
        assert run(stage, [long], chunk=chunk) == run(stage, [long]), chunk


@needs_bf16_dot
def test_cached_blocks_leave_no_trace(load: Load) -> None:
    """A request reuses the first blocks of another one, written in chunks or by decode steps, with an image or none."""
    stage = load("demo")
    first = asked("Why? " * 40, [drawn_image(1, 90, 61)], 40)
    wanted = run(stage, [dataclasses.replace(first, count=6)])
    for chunk in (40, 1000):
        one = Driver(stage, chunk=chunk)
        (owner,) = one.run([first])
        last = (owner.sequence.prompt_length - 1) // driver.BLOCK_SIZE
        for shared in (1, last // 2, last):
            assert run_after(one, owner, shared, dataclasses.replace(first, count=6)) == wanted
    (owner,) = one.run([asked("Why? " * 6, count=40)])
    blocks = (owner.sequence.length - 1) // driver.BLOCK_SIZE
    assert blocks * driver.BLOCK_SIZE > owner.sequence.prompt_length + 16
    turn = asked(owner.sequence.tokens[: owner.sequence.length].tolist(), count=4)
    assert run_after(one, owner, blocks, turn) == run_after(one, owner, 0, turn)


def run_after(
    one: Driver, owner: Running, shared: int, question: Question
) -> list[tuple[list[int], str]]:
    """Run a question that finds its first blocks in the prefix cache, from an earlier request of the driver."""
    running = one.start(0, question)
    one.tables[running.slot, :shared] = one.tables[owner.slot, :shared]
    running.computed = shared * driver.BLOCK_SIZE
    while len(running.output) < question.count:
        one.step([running])
    return reported([running])


@needs_bf16_dot
def test_no_product_is_torchs(load: Load) -> None:
    """Code in oneDNN depends on the number of rows, especially on processors with AMX."""
    stage = load("demo")
    one = Driver(stage, chunk=40)
    with _Operations() as seen:
        one.run(questions(4), arrivals=2)
    assert seen.names, "none was seen"
    products = ("mm", "linear", "matmul", "conv", "mkldnn", "scaled_dot", "einsum")
    assert not [name for name in seen.names if any(part in name for part in products)]


class _Operations(TorchDispatchMode):
    """Collects the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(str(func))
        result: object = func(*args, **(kwargs or {}))
        return result


@needs_bf16_dot
def test_amx_is_not_used(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AMX computes as one without."""
    requested = questions(3)
    wanted = run(load("demo"), requested, chunk=40)
    for module in (attention, products):
        monkeypatch.setattr(module, "has_tiles", lambda: True)
    assert run(load_kernels(TRAINED), requested, chunk=40) == wanted


@needs_bf16_dot
@pytest.mark.parametrize(("name", "threads"), [("demo", 1), ("demo", 2), ("nano3", 1)])
def test_an_image_is_the_same_alone_and_among_others(load: Load, name: str, threads: int) -> None:
    stage = load(name, threads)
    images = [drawn_image(seed, 30 + 31 * seed, 130 - 13 * seed) for seed in range(6)]
    together = encoded(stage, images)
    assert [encoded(stage, [image])[0] for image in images] == together


def encoded(stage: Stage, images: Sequence[Any]) -> list[bytes]:
    jobs = encode_jobs(stage.preprocessor, images, last_page=driver.PAGES - 1)
    shape = (driver.PAGES, driver.ROWS_A_PAGE, stage.info.embedding_row_bytes)
    embeddings = np.zeros(shape, dtype=np.uint8)
    stage.encoder.encode(jobs, embeddings)
    return [embeddings[job.pages].tobytes() for job in jobs]


def answers_of_rank(
    settings: WorkerSettings, path: str, runs: Sequence[tuple[int, int, int]]
) -> list[list[tuple[list[int], str]]]:
    """Return the log-probabilities of the first `count` questions, for runs of (count, chunk size, preempts)."""
    found = []
    # The process is reused by other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "BLOCK_SIZE", 16)
        stage = load_kernels(path, settings=settings)
        for count, chunk, preempts in runs:
            one = driver_of(settings, stage, chunk)
            options = {"arrivals": min(preempts, 1), "preempts": preempts}
            running = one.run(questions(7)[:count], **options)
            assert all(len(each.logprobs) == len(each.output) for each in running)
            found.append(reported(running))
    return found


@needs_bf16_dot
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_the_same_over_ranks(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """Alone and in a batch, with other chunk sizes, and recomputed; all digits of log-probabilities are compared."""
    path = str(make_four_heads(tmp_path / "heads", "nano3", "bfloat16"))
    runs = [(1, 1000, 0), (7, 40, 0), (7, 13, 4)]
    for alone, together, again in ranks.run(answers_of_rank, path, runs, size=size):
        assert together[:1] == alone
        assert again == together


@needs_bf16_dot
def test_logits_differ_without_it(load: Load) -> None:
    stage = load("demo", deterministic=False)
    requested = [*questions(6), asked("Why? " * 20)]
    together = run(stage, requested, chunk=40, arrivals=1, preempts=4)
    assert [run(stage, [one])[0] for one in requested] != together


@needs_bf16_dot
def test_refuses_a_mixture_of_experts(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="experts"):
        load_kernels(checkpoints("nano3moe"))
