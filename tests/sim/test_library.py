"""The engine as a library: whatever a caller passes is recorded as it is used, and replays the same."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vsched.config.sections import RecordConfig
from vsched.errors import RequestRefused
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.record import open_recorder
from vsched.record.replay import replay
from vsched.sim import SimEngine, small_config
from vsched.sim.ranks.symbolic_model import FIRST_TOKEN
from vsched.types import SamplingParams

PROMPT = [FIRST_TOKEN] * 5


class Name(enum.StrEnum):
    MINE = "mine"


class Text(str):
    __slots__ = ()


ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ints for floats": (
        {
            "temperature": 0,
            "top_p": 1,
            "min_p": 0,
            "presence_penalty": 1,
            "frequency_penalty": True,
        },
        {},
    ),
    "numpy numbers": (
        {
            "temperature": np.float32(0),
            "max_tokens": np.int64(3),
            "seed": np.uint8(7),
            "ignore_eos": np.True_,
            "repetition_penalty": np.float64(1.5),
            "logprobs": np.int32(2),
        },
        {"priority": np.int64(2), "ttft_target_ms": np.float64(500).astype(int)},
    ),
    "lists and arrays": (
        {
            "stop": [Text("x")],
            "stop_token_ids": np.array([1, 2]),
            "logit_bias": [[3, 1], (np.int64(4), np.float32(0.5))],
            "bad_words": [[1, 2], np.array([3])],
        },
        {"prompt": np.array(PROMPT)},
    ),
    "bools": ({"ignore_eos": 1, "include_stop": 0, "seed": True}, {"priority": True}),
    "text": (
        {"grammar": Text(), "stop": (Name.MINE,)},
        {
            "request_id": Text("r"),
            "tenant": Name.MINE,
            "session": Text("s"),
            "cache_salt": Text("c"),
        },
    ),
}


class Recorded:
    """Lets the simulated engine's own observer and a record see every event."""

    def __init__(self, *each: Any) -> None:
        self._each = each

    def note(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        for one in self._each:
            one.note(event, now_ns, commands)

    def close(self) -> None:
        for one in self._each:
            one.close()


def recording_engine(path: Path) -> SimEngine:
    engine = SimEngine(small_config(record=RecordConfig(path=str(path))))
    environment = engine.engine._environment
    engine.engine._environment = dataclasses.replace(
        environment,
        open_record=lambda config, kernel: Recorded(
            environment.open_record(config, kernel), open_recorder(config, kernel)
        ),
    )
    return engine


@pytest.mark.sim
@pytest.mark.parametrize("kind", ODD)
async def test_engine_records_what_a_caller_passes_so_that_it_replays(
    tmp_path: Path, kind: str
) -> None:
    sampling, call = ODD[kind]
    path = tmp_path / "run.vlog"
    async with recording_engine(path) as engine:
        stream = await engine.engine.generate(
            **{"prompt": PROMPT, "request_id": "r", **call},
            sampling=SamplingParams(**{"max_tokens": 3, **sampling}),
        )
        tokens = [token async for delta in stream for token in delta.token_ids]
    assert tokens
    report = replay(path)
    assert (report.difference, report.requests) == (None, 1)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"sampling": SamplingParams(temperature="hot")}, "sampling.temperature"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(max_tokens=2.5)}, "sampling.max_tokens"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(seed=2**70)}, "sampling.seed"),
        ({"sampling": SamplingParams(ignore_eos=2)}, "sampling.ignore_eos"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(stop="end")}, "sampling.stop"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(stop=("\ud800",))}, "sampling.stop"),
        ({"sampling": {"temperature": 0}}, "sampling"),
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"tenant": b"mine"}, "tenant"),
        ({"session": None}, "session"),
        ({"request_id": 7}, "request_ids"),
        ({"adapter": None}, "adapter"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "2"]}, "prompt"),
        ({"images": "data:image/png;base64,"}, "images[0]"),
        ({"images": [b"png"]}, "images[0]"),
    ],
)
async def test_engine_refuses_arguments_of_a_wrong_type(call: dict[str, Any], named: str) -> None:
    async with SimEngine() as engine:
        with pytest.raises(RequestRefused, match="Remedy") as caught:
            await engine.engine.generate(**{"prompt": PROMPT, "request_id": "r", **call})
    assert caught.value.message.startswith(f"{named} is not valid: value ")
    assert caught.value.code == "invalid_value"
    assert msgspec.json.encode(caught.value.message)
