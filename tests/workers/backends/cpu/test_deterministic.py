"""`deterministic`: what is computed for a row is the same to the bit, whatever is beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers import driver
from tests.workers.driver import Driver, Question, Running, Stage, drawn_image
from vsched.errors import ConfigError
from vsched.worker.contract import EncodeJob, WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu import operand_choice, prefill_attention, products
from vsched_workers.backends.cpu.kernels import simd
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.plugin import TRAINED

needs_bf16_dot = pytest.mark.skipif(not has_bf16_dot(), reason="needs avx512_bf16")

Load = Callable[..., Stage]

CHUNKS = (1000, 7, 64)
OPERANDS = {"": None, "bf16": BF16, "float32": FLOAT32}


@pytest.fixture(scope="module")
def load(checkpoints: Callable[[str], Path]) -> Load:
    """Return the loaded workers of a checkpoint in bfloat16."""

    @functools.cache
    def stage(
        name: str, threads: int = 1, *, deterministic: bool = True, operand: str = ""
    ) -> Stage:
        assert operand in OPERANDS, "the caller has it chosen; here it tells stages apart"
        path = TRAINED if name == "demo" else checkpoints(name)
        settings = WorkerSettings(threads=threads, deterministic=deterministic)
        return Stage.load(str(path), attention="auto", dtype="bfloat16", settings=settings)

    return stage


def questions(count: int) -> list[Question]:
    """Return questions of many lengths, some of them about images."""
    kinds = [
        Question("What is in the picture?", [drawn_image(1, 90, 61)]),
        Question("Why? " * 6),
        Question("Compare these two.", [drawn_image(2, 56, 84), drawn_image(3, 30, 30)]),
    ]
    return [
        kinds[n % 3] if n < 3 else Question(f"{n}?" * (1 + n % 3), count=8) for n in range(count)
    ]


class Recorded:
    """The logits of each request, by the number of its token, as the worker computed them."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stage = stage
        self._last: list[torch.Tensor] = []
        worker: Any = stage.generator
        head = worker._head

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head(hidden)
            self._last.append(logits.clone())
            return logits

        monkeypatch.setattr(worker, "_head", kept)

    def run(self, asked: Sequence[Question], **options: Any) -> list[list[bytes]]:
        """Return for each request its logits, token by token; a token computed twice must have them twice."""
        arrivals, preempts = options.pop("arrivals", 0), options.pop("preempts", 0)
        one = Driver(self._stage, **options)
        found: dict[int, dict[int, bytes]] = {}
        step = one.step

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
        every = one.run(asked, arrivals=arrivals, preempts=preempts)
        assert all(len(found[n]) == len(each.output) for n, each in enumerate(every))
        return [[found[n][place] for place in sorted(found[n])] for n in range(len(every))]


@needs_bf16_dot
@pytest.mark.parametrize(
    ("name", "threads", "operand"),
    [("demo", 1, "bf16"), ("demo", 2, "float32"), ("nano25", 2, ""), ("nano3", 1, "")],
)
def test_logits_are_the_same_alone_among_others_in_any_chunks_and_recomputed(
    load: Load, name: str, threads: int, operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operand:
        monkeypatch.setattr(products, "operand", lambda: OPERANDS[operand])
        monkeypatch.setattr(prefill_attention, "operand", lambda: OPERANDS[operand])
    recorded = Recorded(load(name, threads, operand=operand), monkeypatch)
    check_invariant(recorded)


@needs_bf16_dot
def test_logits_are_the_same_with_heads_and_blocks_of_whole_vectors(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There decode rows score keys with the dot product of bfloat16."""
    stage = load("tiny25")
    monkeypatch.setattr(driver, "BLOCK_SIZE", 16)
    stage.generator.build_kv(blocks=driver.BLOCKS, block_size=16)
    check_invariant(Recorded(stage, monkeypatch))


def check_invariant(recorded: Recorded) -> None:
    """Check requests alone, among others, in chunks of other sizes, and recomputed."""
    asked = questions(32)
    together = recorded.run(asked, chunk=40, seed=3)
    alone = [recorded.run([asked[n]], chunk=1000)[0] for n in range(6)]
    assert alone == together[:6]
    for chunk in CHUNKS:
        assert recorded.run(asked[:4], chunk=chunk, seed=chunk) == together[:4]
    # A preempted request is recomputed from prompt and output, as after the loss of its rank.
    assert recorded.run(asked[:6], chunk=40, arrivals=1, preempts=4) == together[:6]


@needs_bf16_dot
@pytest.mark.parametrize(("name", "threads"), [("demo", 1), ("demo", 2), ("nano3", 1)])
def test_an_image_is_the_same_alone_and_among_others(load: Load, name: str, threads: int) -> None:
    stage = load(name, threads)
    images = [drawn_image(seed, 30 + 31 * seed, 130 - 13 * seed) for seed in range(6)]
    together = encoded(stage, images)
    assert [encoded(stage, [image])[0] for image in images] == together


def encoded(stage: Stage, images: Sequence[Any]) -> list[bytes]:
    """Return the embeddings of images that are encoded in one batch."""
    jobs, used = [], 0
    for image in images:
        plan = stage.preprocessor.plan_image(*image.size)
        pages = list(range(used, used + -(-plan.tokens // 4)))
        used += len(pages)
        pixels = stage.preprocessor.process_image(image)
        jobs.append(EncodeJob(b"", plan.grid, plan.tokens, pixels, pages))
    embeddings = np.zeros((used, 4, stage.info.embedding_row_bytes), dtype=np.uint8)
    stage.encoder.encode(jobs, embeddings)
    return [embeddings[job.pages].tobytes() for job in jobs]


@needs_bf16_dot
def test_logits_differ_without_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(load("demo", deterministic=False), monkeypatch)
    asked = questions(6)
    together = recorded.run(asked, chunk=40, arrivals=1, preempts=4)
    assert [recorded.run([one], chunk=1000)[0] for one in asked] != together


def test_a_choice_of_operands_is_kept_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operand_choice, "choice_file", lambda: tmp_path / "operand")
    answers = iter([True, False])
    monkeypatch.setattr(operand_choice, "_float32_is_faster", lambda: next(answers))
    first = operand_choice.operand.__wrapped__()
    assert first is FLOAT32
    assert operand_choice.operand.__wrapped__() is first
    assert [file.name for file in tmp_path.iterdir()] == ["operand"]
    # Of two processes that measure at once the first one's choice holds.
    assert operand_choice._keep(tmp_path / "operand", "bfloat16") == "float32"


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"device": "cuda"}),
        (torch.bfloat16, {"attention": "exact"}),
    ],
)
def test_refuses_what_it_cannot_do(dtype: torch.dtype, changes: dict[str, str]) -> None:
    settings = WorkerSettings(deterministic=True, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.deterministic: .* Remedy: "):
        choose_backend(settings, dtype)


def test_refuses_a_processor_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "has_bf16_dot", lambda: False)
    with pytest.raises(ConfigError, match="avx512_bf16"):
        choose_backend(WorkerSettings(deterministic=True), torch.bfloat16)


@needs_bf16_dot
def test_refuses_where_no_choice_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand_choice, "choice_file", lambda: None)
    with pytest.raises(ConfigError, match="NUMBA_CACHE_DIR"):
        choose_backend(WorkerSettings(deterministic=True), torch.bfloat16)


@needs_bf16_dot
def test_refuses_a_mixture_of_experts(checkpoints: Callable[[str], Path]) -> None:
    settings = WorkerSettings(deterministic=True)
    with pytest.raises(ConfigError, match="experts"):
        Stage.load(
            str(checkpoints("nano3moe")), attention="auto", dtype="bfloat16", settings=settings
        )


@needs_bf16_dot
def test_refuses_a_weight_with_an_odd_number_of_inputs() -> None:
    with pytest.raises(ConfigError, match="7 inputs"):
        products.deterministic_product(torch.ones(64, 7).bfloat16(), None, threads=1)
