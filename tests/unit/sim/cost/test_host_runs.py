"""A cost model from the run of another host: the fit finds the costs that made the steps."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.commands import run_command
from vsched.errors import ConfigError
from vsched.policy.measured import StepTime
from vsched.policy_host import HostedRequest
from vsched.sim.cost.host_runs import (
    HostRecorder,
    HostRequest,
    HostStep,
    ImageAt,
    RunHeader,
    RunLine,
    fit_run,
    read_run,
    run_file,
)
from vsched.sim.cost.model import COST_MODELS, CostModel, load_cost_model
from vsched.sim.workload.requests import Text, text_tokens
from vsched.sim.workload.traces import load_trace

HEADER = RunHeader(host="vLLM 1", slots=4, batch_tokens=256, block_size=16, kv_tokens=4096, depth=2)
TRUE = (2e6, 1e5, 20.0, 3e4, 5.0)
OF_IMAGES = (4e6, 5e4, 30.0)
SIZES = (
    *("decodes", "context_tokens", "prefill_tokens", "pairs"),
    *("images", "image_tokens", "image_pairs"),
)
"""Sizes of a step, in the order of the costs."""


def write_run(
    path: Path, steps: int = 200, *, images: bool = False, delayed: float = 1.0, stall: float = 1.0
) -> Path:
    """Write a run whose steps have the costs `TRUE`, with gaps of 300 µs.

    Every fourth step takes `delayed` times as long, and one of them `stall` times.
    """
    rng, now_ns = random.Random(1), 0
    lines: list[object] = [HEADER]
    for number in range(steps):
        decodes, tokens = rng.randint(0, 4), rng.choice([0, 64, 200])
        context, pairs = decodes * rng.randint(10, 900), tokens * rng.randint(32, 2000)
        encoded = [rng.randint(9, 200) for _ in range(rng.randint(0, 2))] if images else []
        of_images = len(encoded), sum(encoded), sum(one * one for one in encoded)
        sizes = (1, decodes, context, tokens, pairs, *of_images)
        costs = (*TRUE, *OF_IMAGES)
        busy_ns = round(sum(size * cost for size, cost in zip(sizes, costs, strict=True)))
        busy_ns = round(busy_ns * (1 if number % 4 else delayed) * (stall if number == 60 else 1))
        now_ns += 300_000 + busy_ns
        named = dict(zip(SIZES, sizes[1:], strict=True))
        lines.append(HostStep(ended_ns=now_ns, busy_ns=busy_ns, **named))
    same: dict[str, Any] = {"ended_ns": now_ns, "queued_ns": 1, "total_ns": 9_000_000}
    same |= {"output_tokens": 4, "cached_tokens": 0, "preemptions": 0}
    lines += [
        HostRequest(
            request_id=str(number),
            tenant=tenant,
            prepared_ns=2_000_000 + 1000 * number,
            ttft_ns=(number + 1) * 1_000_000,
            prompt_tokens=number,
            **same,
        )
        for number, tenant in enumerate(["a", "b", "b"])
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_fit_finds_the_costs_of_the_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "fifo.jsonl.run", images=True))
    model = fit_run(run, COST_MODELS["tiny25"], name="mine")
    found = msgspec.structs.astuple(model.generate)
    assert found == pytest.approx(TRUE, rel=0.01)
    assert msgspec.structs.astuple(model.encode) == pytest.approx((0.0, *OF_IMAGES), rel=0.01)
    assert model.host.gap_ns == 300_000
    assert (model.host.request_ns, model.host.token_ns) == pytest.approx((2e6, 1000), rel=0.01)
    assert model.host.depth == 2
    assert model.kv_tokens == 4096
    assert model.shape == COST_MODELS["tiny25"].shape
    assert run.ttft_ms() == {"": [1, 2, 3], "a": [1], "b": [2, 3]}


def test_delays_that_all_requests_have_are_part_of_the_costs(tmp_path: Path) -> None:
    plain, delayed, stalled = (
        read_run(write_run(tmp_path / f"{number}.run", delayed=factor, stall=stall))
        for number, (factor, stall) in enumerate([(1.0, 1.0), (2.5, 1.0), (2.5, 1000.0)])
    )
    base = COST_MODELS["tiny25"]
    model, after_stall = (fit_run(one, base, name="") for one in (delayed, stalled))

    def total_ns(costs: CostModel) -> float:
        total = 0.0
        for one in delayed.steps:
            sizes: dict[str, Any] = {"prefill": one.prefill_tokens, "pairs": one.pairs}
            total += costs.generate_ns(decodes=one.decodes, context=one.context_tokens, **sizes)
        return total

    measured_ns = sum(one.busy_ns for one in delayed.steps)
    assert measured_ns > 1.3 * sum(one.busy_ns for one in plain.steps)
    assert total_ns(model) == pytest.approx(measured_ns, rel=0.01)
    assert total_ns(after_stall) == pytest.approx(measured_ns, rel=0.05)


def test_command_writes_a_cost_model_and_reports_the_next_step(tmp_path: Path) -> None:
    run, cost = write_run(tmp_path / "fifo.jsonl.run"), tmp_path / "cost.json"
    output = run_command("calibrate-vllm", run, "--output", cost)
    assert load_cost_model(cost).name == "fifo"
    assert "all: 3 requests, TTFT p50 2 ms" in output
    assert f"--trace {tmp_path}/fifo.jsonl --set generate.slots=4" in output
    assert "placement=together" not in output
    write_run(run, images=True)
    output = run_command("calibrate-vllm", run, "--output", cost)
    assert "--set generate.prefix_cache=true --set placement=together" in output


def test_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """Or that cannot be written."""
    with pytest.raises(ConfigError, match="10 steps, too few for a fit"):
        read_run(write_run(tmp_path / "short", steps=10))
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ConfigError, match="not a run"):
        read_run(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"trace: .* cannot be written .*Remedy: name a file"):
        HostRecorder(str(tmp_path / "no" / "run.jsonl"), TRACE_HEADER)


TRACE_HEADER = RunHeader(host="test", slots=4, batch_tokens=64, block_size=4, kv_tokens=100)


class Plain(HostedRequest):
    """A request that has ended."""

    prompt_tokens = 0
    output_tokens = 5
    computed_tokens = 0
    preemptions = 0

    def __init__(self, number: int, arrived_ns: int, tokens: int) -> None:
        super().__init__((number, 0), arrived_ns=arrived_ns, tenant="a", session="s", priority=2)
        self.prompt_tokens = tokens


def recording(trace: Path) -> AbstractContextManager[HostRecorder]:
    return closing(HostRecorder(str(trace), TRACE_HEADER))


def begin(recorder: HostRecorder, number: int, at_ns: int, tokens: int) -> Plain:
    request = Plain(number, at_ns, tokens)
    recorder.note_arrival(request, at_ns + 30)
    return request


def end(
    recorder: HostRecorder,
    one: Plain,
    hashes: Sequence[Hashable] = (),
    images: Sequence[ImageAt] = (),
    *,
    kept: bool = True,
) -> None:
    recorder.note_end(one, f"r{one.order[0]}", 900, hashes, images, kept=kept)


def test_arrivals_come_in_order_with_their_tenants(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with recording(trace) as recorder:
        requests = [begin(recorder, number, 100 + 10 * number, 9) for number in range(3)]
        end(recorder, requests[2])
        end(recorder, requests[0], kept=False)  # its client left
        end(recorder, requests[1])
        end(recorder, begin(recorder, 3, 140, 9))
        recorder.note_step(StepTime(5, 4, 3, 2, 1, 0.5), 70, [3, 4])
    first, second, last = load_trace(trace)
    assert (first.request_id, second.request_id, last.conversation) == ("r1", "r2", "s")
    assert (first.at_ns, second.at_ns) == (0, 10)
    # Concurrent requests of one session become conversations of their own, which do not wait for each other.
    assert (first.conversation, second.conversation) == ("s 1", "s 2")
    facts = (first.tenant, first.priority, first.prompt_tokens, first.output_tokens)
    assert facts == ("a", 2, 9, 5)
    header, *noted, step = (
        msgspec.json.decode(line, type=RunLine)
        for line in run_file(trace).read_bytes().splitlines()
    )
    assert header == TRACE_HEADER
    assert {one.prepared_ns for one in noted if isinstance(one, HostRequest)} == {30}
    sizes: dict[str, Any] = dict(zip(SIZES, (2, 70, 1, 0.5, 2, 7, 25), strict=True))
    assert step == HostStep(ended_ns=5, busy_ns=4, **sizes)


def test_prompts_share_as_many_first_tokens_as_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    blocks = ["A", "AB", "ABC"], ["A", "AB", "ABX"], ["A", "AB", "ABX", "ABXY"], ["Q"]
    with recording(trace) as recorder:
        for number, hashes in enumerate(blocks):
            end(recorder, begin(recorder, number, number, 4 * len(hashes) + 2), hashes)
    prompts = [
        [token for part in one.prompt if isinstance(part, Text) for token in text_tokens(part)]
        for one in load_trace(trace)
    ]

    def shared(one: int, other: int) -> int:
        pairs = zip(prompts[one], prompts[other], strict=False)
        return next(index for index, (a, b) in enumerate(pairs) if a != b)

    assert [len(prompt) for prompt in prompts] == [14, 14, 18, 6]
    assert shared(0, 1) == 8
    assert shared(1, 2) >= 12
    assert shared(0, 2) == 8
    assert shared(0, 3) == 0


def test_images_keep_their_keys_and_places(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with recording(trace) as recorder:
        end(recorder, begin(recorder, 0, 0, 20), ["A"], [("k1", 5, 3), ("k2", 10, 6)])
    (arrival,) = load_trace(trace)
    assert [part.tokens for part in arrival.prompt] == [5, 3, 2, 6, 4]
    assert [image.key for image in arrival.images] == ["k1", "k2"]
