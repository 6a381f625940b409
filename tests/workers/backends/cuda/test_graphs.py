"""Captured decode steps on a CPU: everything but the capture itself, whose replay runs the step again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, compare, generated, prompts
from tests.workers.adapters.random_adapters import add_adapters, random_adapter
from tests.workers.backends.cuda.races import CapturingBackend, LateStream
from tests.workers.driver import (
    BLOCK_SIZE,
    BLOCKS,
    Checkpoints,
    Driver,
    Question,
    Stage,
    Stages,
    outputs,
)
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched.errors import DeviceOutOfMemory
from vsched.types import SamplingParams
from vsched.worker.contract import Batch, WorkerSettings
from vsched_workers import language
from vsched_workers.batching.paged_attention import PagedStep

TRIED_STEPS = 2
"""Replays in the trial of captured steps, at a load."""


@dataclasses.dataclass
class Captured:
    """A stage with captured decode steps, and their graph stream.

    Attributes:
        begun: Steps that were not started ahead.
    """

    stage: Stage
    stream: LateStream
    begun: list[Batch] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        begin = self.graphs._start_batch

        def noted_begin(batch: Batch) -> object:
            self.begun.append(batch)
            return begin(batch)

        self.graphs._start_batch = noted_begin

    @property
    def graphs(self) -> Any:
        return self.stage.generator._captured  # type: ignore[attr-defined]

    @property
    def steps(self) -> int:
        """Number of captured steps, not counting the trial."""
        return self.stream.starts - TRIED_STEPS

    def build(self) -> None:
        self.stage.generator.build_kv(blocks=BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture
def generic(monkeypatch: pytest.MonkeyPatch) -> list[CapturingBackend]:
    """Return the list of backends, all with captured steps, of models that the test loads."""
    made: list[CapturingBackend] = []

    def choose(settings: WorkerSettings, dtype: torch.dtype, *_: str) -> CapturingBackend:
        made.append(CapturingBackend(settings, dtype))
        return made[-1]

    monkeypatch.setattr(language, "choose_backend", choose)
    return made


Plain = Callable[..., list[list[int]]]
Load = Callable[..., Captured]


@pytest.fixture
def captured(checkpoints: Checkpoints, generic: list[CapturingBackend]) -> Load:
    def load(size: str = "nano25") -> Captured:
        stage = Stage.load(checkpoints(size), adapters=1, adapter_rank_max=4)
        return Captured(stage, generic[-1].stream)

    return load


@pytest.fixture
def plain(stages: Stages) -> Plain:
    """Return the outputs of eager steps."""
    eager = {size: stages(size) for size in ("nano25", "nano3")}
    return lambda questions, *, size="nano25", **options: run(eager[size], questions, **options)


def lone(count: int, **sampling: Any) -> Question:
    chosen = SamplingParams(**{"temperature": 0.0, **sampling})
    return Question("How many objects are there?", count=count, sampling=chosen)


def run(stage: Stage, questions: list[Question], **options: int) -> list[list[int]]:
    driver = Driver(stage, chunk=options.pop("chunk", 48), seed=1)
    return outputs(driver.run(questions, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("nano25", {"arrivals": 2}),
        ("nano3", {"preempts": 5, "chunk": 1000}),
        *thorough(("nano3", {"arrivals": 2}), ("nano25", {"preempts": 5, "chunk": 1000})),
    ],
)
def test_captured_steps_equal_eager_ones(
    plain: Plain, captured: Load, size: str, options: dict[str, int]
) -> None:
    """Padded rows, mixed with steps that have chunks: the same tokens as in eager steps."""
    found = captured(size)
    questions = [dataclasses.replace(each, count=20) for each in mixed_questions()]
    expected = plain(questions, size=size, **options)
    assert run(found.stage, questions, **options) == expected
    assert found.steps > 0


def test_steps_with_an_adapter_are_not_captured_and_others_still_are(
    plain: Plain, captured: Load, checkpoints: Checkpoints
) -> None:
    """An adapter is added and removed while steps run ahead: graphs neither refer to it nor omit it."""
    found = captured()
    config = AutoConfig.from_pretrained(checkpoints("nano25"))
    adapter = random_adapter(config.text_config, rank=4, seed=1, prefix="model.language_model.")
    alone, other = lone(24), dataclasses.replace(lone(9), adapter=1)
    add_adapters(found.stage, [adapter])
    (expected,) = plain([alone])
    first, second = run(found.stage, [alone, other], arrivals=8)
    assert first == expected
    assert second != expected[:9]
    assert 10 < found.steps < 24, "the steps of one alone are captured"
    before = found.stream.starts
    assert run(found.stage, [other]) == [second]
    assert found.stream.starts == before


def test_steady_rows_need_no_input_from_the_host(plain: Plain, captured: Load) -> None:
    """Tokens stay on the device; the host only sends something when a sequence enters a new block."""
    found = captured()
    assert run(found.stage, [lone(41)]) == plain([lone(41)])
    blocks = 40 // BLOCK_SIZE
    assert 40 <= found.steps <= 42
    assert found.stream.uploads <= 2 * (blocks + 2)


def test_steps_start_early_and_their_results_are_used(plain: Plain, captured: Load) -> None:
    """When a sequence ends, the others take their tokens from the step in flight."""
    found = captured()
    questions = [lone(18), dataclasses.replace(lone(30), text="Compare."), lone(26)]
    assert run(found.stage, questions) == plain(questions)
    steps = 29
    assert len(found.begun) < steps
    assert found.steps <= steps + 3


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"seed": 4, "top_p": 0.9, "top_k": 40}, {"arrivals": 7}),
        (
            # The last token matters: two likely tokens alternate.
            {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 2.0}
            | {"logit_bias": ((9, 7.0), (11, 7.0))},
            {},
        ),
        *thorough(
            ({"seed": 3}, {"preempts": 5}),
            ({"seed": 6, "min_tokens": 9, "bad_words": ((7,),), "min_p": 0.01}, {"preempts": 5}),
        ),
    ],
    ids=["nucleus", "penalties", "temperature", "bounded"],
)
def test_sampled_rows_run_ahead(
    plain: Plain, captured: Load, fields: dict[str, Any], options: dict[str, int]
) -> None:
    """Greedy and sampled rows in one batch; also with dropped steps after a preemption or a new request."""
    found = captured()
    sampled = {"temperature": 0.5, **fields}
    questions = [lone(30), lone(18, **sampled), lone(26, **sampled)]
    expected = plain(questions, **options)
    assert run(found.stage, questions, **options) == expected
    assert expected[1] != plain([lone(18)])[0], "it was sampled"
    assert found.steps - len(found.begun) > (2 if options else 12)


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"bad_words": ((7, 9),)}])
def test_rows_that_the_host_must_see_stop_running_ahead(
    plain: Plain, captured: Load, fields: dict[str, Any]
) -> None:
    found = captured()
    questions = [lone(20), lone(20, temperature=1.0, seed=1, **fields)]
    assert run(found.stage, questions) == plain(questions)
    assert found.steps == len(found.begun) > 0


def test_padding_touches_no_free_block(captured: Load) -> None:
    found = captured()
    driver = Driver(found.stage, chunk=48)
    driver.run([lone(9), lone(11), lone(10)])
    cache = found.stage.generator._cache  # type: ignore[attr-defined]
    free = torch.tensor(driver.blocks)
    for held in (*cache.keys, *cache.values):
        assert held.shape[0] == (BLOCKS + 1) * BLOCK_SIZE
        blocks = held.view(BLOCKS + 1, -1)
        assert not blocks[free].any()
        assert blocks[BLOCKS].any(), "three rows are padded to four"


def test_capture_that_fails_leaves_eager_steps(
    plain: Plain, captured: Load, caplog: pytest.LogCaptureFixture
) -> None:
    found = captured()
    found.stream.failure = RuntimeError("operation not permitted when stream is capturing")
    found.build()
    with caplog.at_level(logging.WARNING):
        got = run(found.stage, [lone(12)])
    assert got == plain([lone(12)])
    assert found.stream.starts == 0
    assert [each.getMessage() for each in caplog.records] == [
        (
            "decode steps run without CUDA graphs, which is slower: "
            "operation not permitted when stream is capturing"
        )
    ]


def test_capture_reports_out_of_memory(captured: Load) -> None:
    """The KV cache has to be made smaller, not the steps slower."""
    found = captured()
    found.stream.failure = torch.OutOfMemoryError("CUDA out of memory")
    found.build()
    with pytest.raises(DeviceOutOfMemory, match="capturing decode steps"):
        run(found.stage, [lone(12)])


def test_graphs_go_before_the_cache_and_come_back(captured: Load) -> None:
    """Captured steps point into the cache."""
    found = captured()
    generator = found.stage.generator
    first = run(found.stage, [lone(12)])
    generator.drop_graphs()
    assert found.stream.forgotten == 1
    generator.drop_kv()
    found.build()
    found.stream.starts = 0
    assert run(found.stage, [lone(12)]) == first
    assert found.stream.starts > TRIED_STEPS


@pytest.mark.parametrize("factor", [2.0, float("nan")])
def test_steps_that_replay_other_logits_than_eager_ones_are_dropped(
    factor: float,
    plain: Plain,
    captured: Load,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of a model whose code depends on a position that the host knew during the capture."""
    found = captured()
    graphs = found.graphs
    run_model = graphs._run

    def by_position(ids: torch.Tensor, at: torch.Tensor, step: PagedStep) -> torch.Tensor:
        logits: torch.Tensor = run_model(ids, at, step)
        return logits * (1 + at[0, 0, 0])

    monkeypatch.setattr(graphs, "_run", by_position)
    capture = found.stream.capture

    def once(run: Any) -> Any:
        _, result = capture(run)
        return (lambda: result.mul_(factor / 2)), result

    monkeypatch.setattr(found.stream, "capture", once)
    with caplog.at_level(logging.WARNING):
        got = run(found.stage, [lone(12)])
    assert got == plain([lone(12)])
    assert "replayed logits are wrong" in caplog.text


@pytest.mark.parametrize("name", ["stablelm", *thorough("qwen3_next", "falcon_h1", "lfm2")])
def test_captured_steps_of_generic_models_generate_the_same(
    name: str, generic: list[CapturingBackend]
) -> None:
    """With recurrent states, whose slots are among the inputs of a captured step, and whose padding has a spare row."""
    assert not compare(name).unequal
    assert generic[0].stream.starts > 2 * OUTPUTS


def test_states_do_not_advance_in_a_step_that_is_dropped(
    generic: list[CapturingBackend], tmp_path: Path
) -> None:
    """A request arrives while another decodes steadily: a step that ran ahead would be dropped, and computed again."""
    make_checkpoint("qwen3_next", tmp_path)
    asked = prompts()[:2]
    stage = Stage.load(tmp_path)
    questions = [Question(prompt, count=24) for prompt in asked]
    found = outputs(Driver(stage, chunk=48).run(questions, arrivals=9))
    assert found == generated(tmp_path, asked, outputs=24)
    assert generic[0].stream.starts > 24


def test_steps_of_some_layers_are_not_captured(plain: Plain, captured: Load) -> None:
    """A profiling run skips layers before the first step of all of them."""
    found = captured()
    with found.stage.generator.first_layers(1):
        run(found.stage, [lone(3)])
    assert found.stream.starts == 0
    assert run(found.stage, [lone(12)]) == plain([lone(12)])
    assert found.steps > 0
