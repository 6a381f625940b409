"""`deterministic`: the result of a row is the same to the bit for any batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import prompts
from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import needs_bf16_dot
from tests.workers.driver import Driver, Question, Running, Stage, drawn_image
from vsched.errors import ConfigError
from vsched.worker.contract import EncodeJob, WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu import attention, products
from vsched_workers.backends.cpu.kernels import simd
from vsched_workers.plugin import TRAINED

Load = Callable[..., Stage]

CHUNKS = (1000, 7, 64)


@pytest.fixture(scope="module")
def load(checkpoints: Callable[[str], Path]) -> Load:
    """Return the loaded workers of a checkpoint in bfloat16."""

    @functools.cache
    def stage(name: str, threads: int = 1, *, deterministic: bool = True) -> Stage:
        path = TRAINED if name == "demo" else checkpoints(name)
        settings = WorkerSettings(threads=threads, deterministic=deterministic)
        return Stage.load(path, attention="auto", dtype="bfloat16", settings=settings)

    return stage


def questions(count: int) -> list[Question]:
    """Return questions of various lengths, some about images."""
    kinds = [
        Question("What is in the picture?", [drawn_image(1, 90, 61)]),
        Question("Why? " * 6),
        Question("Compare these two.", [drawn_image(2, 56, 84), drawn_image(3, 30, 30)]),
    ]
    return [
        kinds[n % 3] if n < 3 else Question(f"{n}?" * (1 + n % 3), count=8) for n in range(count)
    ]


class Recorded:
    """Logits of each request, by the index of its token, as the worker computed them."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = stage
        self._last: list[torch.Tensor] = []
        worker: Any = stage.generator
        head = worker._head

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head(hidden)
            self._last.append(logits.clone())
            return logits

        monkeypatch.setattr(worker, "_head", kept)

    def run(self, requested: Sequence[Question], **options: Any) -> list[list[bytes]]:
        """Return the logits of each request, token by token; a recomputed token must have the same logits."""
        arrivals, preempts = options.pop("arrivals", 0), options.pop("preempts", 0)
        one = options.pop("driver", None) or Driver(self.stage, **options)
        found: dict[int, dict[int, bytes]] = {}
        step = functools.partial(Driver.step, one)

        def watched(active: Sequence[Running]) -> None:
            before = {each.sequence.number: each.sequence.length for each in active}
            decoding = sorted(
                (e for e in active if e.computed == e.sequence.length - 1 and e.output),
                key=lambda each: each.slot,
            )
            order = [*decoding, *(each for each in active if each not in decoding)]
            self._last.clear()
            step(active)
            rows = [e for e in order if e.sequence.length > before[e.sequence.number]]
            for row, each in enumerate(rows):
                number = each.sequence.number
                bits = self._last[0][row].view(torch.int16).numpy().tobytes()
                found.setdefault(number, {})[before[number]] = bits

        one.step = watched  # type: ignore[method-assign]
        every = one.run(requested, arrivals=arrivals, preempts=preempts)
        assert all(len(found[n]) == len(each.output) for n, each in enumerate(every))
        return [[found[n][place] for place in sorted(found[n])] for n in range(len(every))]


@needs_bf16_dot
@pytest.mark.parametrize(("name", "threads"), [("demo", 2), ("nano25", 2), ("nano3", 1)])
def test_logits_are_the_same_alone_among_others_in_any_chunks_and_recomputed(
    load: Load, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(load(name, threads), monkeypatch)
    requested = questions(32)
    together = recorded.run(requested, chunk=40, seed=3)
    alone = [recorded.run([requested[n]], chunk=1000)[0] for n in range(6)]
    assert alone == together[:6]
    for chunk in CHUNKS:
        assert recorded.run(requested[:4], chunk=chunk, seed=chunk) == together[:4]
    # A preempted request is recomputed from prompt and output, as after the loss of its rank.
    assert recorded.run(requested[:6], chunk=40, arrivals=1, preempts=4) == together[:6]


@needs_bf16_dot
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_of_text_alone_leaves_no_trace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For decoder-only models of any family: alone in one chunk, or in a batch with small chunks, preempted.

    gemma2 has sliding windows and soft-capping.
    """
    make_checkpoint(name, tmp_path)
    settings = WorkerSettings(threads=1, deterministic=True)
    stage = Stage.load(tmp_path, attention="auto", dtype="bfloat16", settings=settings)
    recorded = Recorded(stage, monkeypatch)
    requested = [Question(prompt, count=8) for prompt in prompts()]
    together = recorded.run(requested, chunk=7, arrivals=1, preempts=4)
    assert [recorded.run([each], chunk=1000)[0] for each in requested] == together


@needs_bf16_dot
@pytest.mark.parametrize("threads", [1, 2])
def test_borders_of_chunks_leave_no_trace(
    load: Load, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end within and at the ends of blocks of keys, and of images; some are one row."""
    recorded = Recorded(load("demo", threads), monkeypatch)
    long = Question("Which one? " * 40, [drawn_image(1, 200, 180)], count=4)
    assert len(recorded.stage.prompt(long)[0]) > 260
    whole = recorded.run([long], chunk=1000)
    for chunk in (1, 13, 129):
        assert recorded.run([long], chunk=chunk) == whole, chunk


@needs_bf16_dot
def test_a_cached_prefix_leaves_no_trace(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request reuses the first blocks of another one, written in chunks or by decode steps."""
    recorded = Recorded(load("demo"), monkeypatch)
    first = Question("Why? " * 40, [drawn_image(1, 90, 61)], count=40)
    second = dataclasses.replace(first, count=6)
    (wanted,) = recorded.run([second], chunk=1000)
    for chunk in (40, 1000):
        one = Driver(recorded.stage, chunk=chunk)
        (owner,) = one.run([first])
        blocks = owner.sequence.prompt_length // driver.BLOCK_SIZE
        assert blocks > 4
        for shared in (
            1,
            blocks // 2,
            blocks - (owner.sequence.prompt_length % driver.BLOCK_SIZE == 0),
        ):
            _give_blocks(one, owner, shared)
            assert recorded.run([second], driver=one) == [wanted]


@needs_bf16_dot
def test_a_cached_answer_leaves_no_trace(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks written by decode steps are the prefix of the next turn of a conversation."""
    recorded = Recorded(load("demo"), monkeypatch)
    one = Driver(recorded.stage, chunk=40)
    (owner,) = one.run([Question("Why? " * 6, count=40)])
    blocks = (owner.sequence.length - 1) // driver.BLOCK_SIZE
    assert blocks * driver.BLOCK_SIZE > owner.sequence.prompt_length + 16
    tokens = owner.sequence.tokens[: owner.sequence.length].tolist()
    monkeypatch.setattr(recorded.stage, "prompt", lambda _question: (tokens, []))
    found = []
    for shared in (blocks, 0):
        _give_blocks(one, owner, shared)
        found.append(recorded.run([Question("", count=4)], driver=one))
    assert found[0] == found[1]


def _give_blocks(one: Driver, owner: Running, shared: int) -> None:
    """Let the next request of a driver find its first blocks in the prefix cache, from an earlier request."""

    def start(number: int, question: Question) -> Running:
        started = Driver.start(one, number, question)
        one.tables[started.slot, :shared] = one.tables[owner.slot, :shared]
        started.computed = shared * driver.BLOCK_SIZE
        return started

    one.start = start  # type: ignore[method-assign]


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
    wanted = Recorded(load("demo"), monkeypatch).run(requested, chunk=40)
    monkeypatch.undo()
    for module in (attention, products):
        monkeypatch.setattr(module, "has_tiles", lambda: True)
    settings = WorkerSettings(threads=1, deterministic=True)
    stage = Stage.load(TRAINED, attention="auto", dtype="bfloat16", settings=settings)
    assert Recorded(stage, monkeypatch).run(requested, chunk=40) == wanted


@needs_bf16_dot
@pytest.mark.parametrize(("name", "threads"), [("demo", 1), ("demo", 2), ("nano3", 1)])
def test_an_image_is_the_same_alone_and_among_others(load: Load, name: str, threads: int) -> None:
    stage = load(name, threads)
    images = [drawn_image(seed, 30 + 31 * seed, 130 - 13 * seed) for seed in range(6)]
    together = encoded(stage, images)
    assert [encoded(stage, [image])[0] for image in images] == together


def encoded(stage: Stage, images: Sequence[Any]) -> list[bytes]:
    """Return the embeddings of images encoded in one batch."""
    jobs, used = [], 0
    for image in images:
        plan = stage.preprocessor.plan_image(*image.size)
        pages = list(range(used, used + -(-plan.tokens // 4)))
        used += len(pages)
        arrays = stage.preprocessor.process_image(image)
        jobs.append(EncodeJob(b"", plan.tokens, arrays, plan.metadata, pages))
    embeddings = np.zeros((used, 4, stage.info.embedding_row_bytes), dtype=np.uint8)
    stage.encoder.encode(jobs, embeddings)
    return [embeddings[job.pages].tobytes() for job in jobs]


@needs_bf16_dot
def test_logits_differ_without_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(load("demo", deterministic=False), monkeypatch)
    requested = [*questions(6), Question("Why? " * 20)]
    together = recorded.run(requested, chunk=40, arrivals=1, preempts=4)
    assert [recorded.run([one], chunk=1000)[0] for one in requested] != together


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"device": "cuda"}),
        (torch.bfloat16, {"attention": "exact"}),
    ],
)
def test_refuses_input_that_it_cannot_do(dtype: torch.dtype, changes: dict[str, str]) -> None:
    settings = WorkerSettings(deterministic=True, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.deterministic: .* Remedy: "):
        choose_backend(settings, dtype)


def test_refuses_a_processor_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "has_bf16_dot", lambda: False)
    with pytest.raises(ConfigError, match="avx512_bf16"):
        choose_backend(WorkerSettings(deterministic=True), torch.bfloat16)


@needs_bf16_dot
def test_refuses_a_mixture_of_experts(checkpoints: Callable[[str], Path]) -> None:
    settings = WorkerSettings(deterministic=True)
    with pytest.raises(ConfigError, match="experts"):
        Stage.load(checkpoints("nano3moe"), attention="auto", dtype="bfloat16", settings=settings)
