"""The trace of another host: what it writes, `vsched simulate --trace` reads; shared beginnings stay shared."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import msgspec
import pytest

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
    run_file,
)
from vsched.sim.workload.requests import Arrival, Image, text_tokens
from vsched.sim.workload.traces import load_trace

HEADER = RunHeader(host="test", slots=4, batch_tokens=64, block_size=4, kv_tokens=100)


class Plain(HostedRequest):
    """A request that has ended."""

    prompt_tokens = 0
    output_tokens = 5
    computed_tokens = 0
    preemptions = 0

    def __init__(self, number: int, arrived_ns: int, tokens: int) -> None:
        super().__init__((number, 0), arrived_ns=arrived_ns, tenant="a", session="s", priority=2)
        self.prompt_tokens = tokens


def end(
    recorder: HostRecorder,
    one: Plain,
    hashes: Sequence[Hashable] = (),
    images: Sequence[ImageAt] = (),
    *,
    kept: bool = True,
) -> None:
    recorder.note_end(one, f"r{one.order[0]}", 900, hashes, images, kept=kept)


def prompt_ids(arrival: Arrival) -> list[object]:
    """Return the tokens of a prompt as the simulation compares them."""
    found: list[object] = []
    for part in arrival.prompt:
        if isinstance(part, Image):
            found += [part.key] * part.tokens
        else:
            found += text_tokens(part) if hasattr(part, "content") else []  # type: ignore[arg-type]
    return found


def test_arrivals_come_in_order_with_their_tenants(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    recorder = HostRecorder(str(trace), HEADER)
    requests = [Plain(number, 100 + 10 * number, 9) for number in range(3)]
    for request in requests:
        recorder.note_arrival(request, request.arrived_ns + 30)
    end(recorder, requests[2])
    end(recorder, requests[0], kept=False)  # its client left
    end(recorder, requests[1])
    recorder.note_step(StepTime(5, 4, 3, 2, 1, 0.5), 70, [3, 4])
    recorder.close()
    first, second = load_trace(trace)
    assert (first.request_id, second.request_id) == ("r1", "r2")
    assert (first.at_ns, second.at_ns) == (0, 10)
    assert (first.tenant, first.conversation, first.priority) == ("a", "s", 2)
    assert (first.prompt_tokens, first.output_tokens) == (9, 5)
    lines = [
        msgspec.json.decode(line, type=RunLine)
        for line in run_file(trace).read_bytes().splitlines()
    ]
    assert lines[0] == HEADER
    assert {one.prepared_ns for one in lines if isinstance(one, HostRequest)} == {30}
    assert lines[-1] == HostStep(
        ended_ns=5,
        busy_ns=4,
        decodes=2,
        context_tokens=70,
        prefill_tokens=1,
        pairs=0.5,
        images=2,
        image_tokens=7,
        image_pairs=25,
    )


def test_prompts_share_as_many_first_tokens_as_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    recorder = HostRecorder(str(trace), HEADER)
    blocks = ["A", "AB", "ABC"], ["A", "AB", "ABX"], ["A", "AB", "ABX", "ABXY"], ["Q"]
    for number, hashes in enumerate(blocks):
        request = Plain(number, number, 4 * len(hashes) + 2)
        recorder.note_arrival(request, request.arrived_ns + 30)
        end(recorder, request, hashes)
    recorder.close()
    prompts = [prompt_ids(arrival) for arrival in load_trace(trace)]

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
    recorder = HostRecorder(str(trace), HEADER)
    request = Plain(0, 0, 20)
    recorder.note_arrival(request, request.arrived_ns + 30)
    end(recorder, request, ["A"], [("k1", 5, 3), ("k2", 10, 6)])
    recorder.close()
    (arrival,) = load_trace(trace)
    assert [part.tokens for part in arrival.prompt] == [5, 3, 2, 6, 4]
    assert [image.key for image in arrival.images] == ["k1", "k2"]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .* cannot be written .*Remedy: name a file"):
        HostRecorder(str(tmp_path / "no" / "run.jsonl"), HEADER)
