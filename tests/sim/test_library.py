"""The engine as a library: arguments are recorded with the types that are used, and abandoned streams are aborted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from vsched.aio.streams import Generation, TokenStream
from vsched.config.sections import RecordConfig
from vsched.engine import Engine
from vsched.errors import RequestRefused
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.media.references import MediaReference
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
    """Sends every event to the simulated engine's own observer and to a record."""

    def __init__(self, *each: Any) -> None:
        self._each = each

    def record_event(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        for one in self._each:
            one.record_event(event, now_ns, commands)

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
async def test_engine_records_the_arguments_of_a_caller_so_that_they_replay(
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
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"tenant": b"mine"}, "tenant"),
        ({"request_id": 7}, "request_ids"),
        ({"prompt": [1, "2"]}, "prompt"),
        ({"images": "data:image/png;base64,"}, "images[0]"),
        ({"images": [b"png"]}, "images[0]"),
        ({"images": MediaReference("png", is_embedded=True)}, "images[0]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"sampling": {}}, "sampling"),
    ],
)
async def test_engine_refuses_arguments_of_a_wrong_type(call: dict[str, Any], named: str) -> None:
    async with SimEngine() as engine:
        with pytest.raises(RequestRefused, match="Remedy") as caught:
            await engine.engine.generate(**{"prompt": PROMPT, "request_id": "r", **call})
    assert caught.value.message.startswith(f"{named} is not valid: value ")
    assert caught.value.code == "invalid_value"
    assert msgspec.json.encode(caught.value.message)


@pytest.mark.sim
async def test_engine_refuses_an_id_that_is_in_use() -> None:
    async with SimEngine() as engine:
        with pytest.raises(RequestRefused, match="in use") as caught:
            await engine.engine.generate_choices(prompt=PROMPT, request_ids=["twice", "twice"])
    assert caught.value.status == 409


# --- leaving a stream ---


@pytest.mark.sim
async def test_engine_draws_a_seed_for_each_request_without_one() -> None:
    """Equal prompts would get equal answers; equal engines draw the same seeds."""

    async def seeds(seed: int) -> list[int | None]:
        async with SimEngine(seed=seed) as sim:
            assert sim.engine._running is not None
            held = [
                await sim.engine.generate(prompt=PROMPT, sampling=sampling, request_id=name)
                for name, sampling in {
                    "a": None,
                    "b": SamplingParams(max_tokens=4),
                    "c": SamplingParams(max_tokens=4, seed=5),
                }.items()
            ]
            found = [
                state.request.sampling.seed for state in sim.engine._running.shell.kernel.requests
            ]
            assert len(held) == len(found)
            return found

    first, second, given = await seeds(1)
    assert (len({None, first, second}), given) == (3, 5)
    assert await seeds(1) == [first, second, 5]
    assert (await seeds(2))[0] != first


async def by_break(engine: Engine, **call: Any) -> object:
    generation = await engine.generate(**call)
    async for _ in generation:
        break
    return generation


async def by_closing(engine: Engine, **call: Any) -> object:
    generation = await engine.generate(**call)
    async with contextlib.aclosing(generation):
        await anext(generation)
    assert [delta async for delta in generation] == []
    return generation


async def by_cancelling(engine: Engine, **call: Any) -> object:
    began = asyncio.Event()

    async def read() -> None:
        async for _ in generation:
            began.set()

    generation = await engine.generate(**call)
    reading = asyncio.create_task(read())
    await began.wait()
    reading.cancel()
    await asyncio.wait([reading])
    return generation


async def by_forgetting(engine: Engine, **call: Any) -> object:
    await engine.generate(**call)
    return None


async def by_forgetting_in_a_thread(engine: Engine, **call: Any) -> object:
    held = [await engine.generate(**call)]
    await asyncio.to_thread(held.clear)
    return None


async def by_leaving_one_answer(engine: Engine, **call: Any) -> object:
    name = call.pop("request_id")
    first, second = await engine.generate_choices(**call, request_ids=(name, f"{name}#1"))
    async for _ in second:
        break
    del second
    await asyncio.sleep(0)
    assert (engine.explain(f"{name}#1"), engine.explain(name) != "") == ("", True)
    async for _ in first:
        break
    return first


async def by_leaving_the_texts(engine: Engine, **call: Any) -> object:
    async for _ in engine.stream(**call):
        break
    await asyncio.sleep(0)
    return None


WAYS = (
    by_break,
    by_closing,
    by_cancelling,
    by_forgetting,
    by_forgetting_in_a_thread,
    by_leaving_one_answer,
    by_leaving_the_texts,
)


@pytest.mark.sim
@pytest.mark.parametrize("leave", WAYS)
async def test_generation_that_is_left_ends_its_request(leave: Callable[..., Any]) -> None:
    async with SimEngine() as engine:
        sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        kept = await leave(engine.engine, prompt=PROMPT, request_id="r", sampling=sampling)
        await asyncio.sleep(0)
        assert engine.engine.explain("r") == ""
        statistics = engine.engine.statistics()
        assert (statistics["running"], statistics["waiting"]) == (0, 0)
        assert statistics["finished"]["abort"] == 1 + (leave is by_leaving_one_answer)
        del kept
        await engine.heal()


def test_generation_that_outlives_its_loop_is_forgotten_in_peace() -> None:
    held = []

    async def leave() -> None:
        stream = cast("TokenStream", SimpleNamespace(take=None, reason=None, abort=None))
        held.append(Generation(stream))

    asyncio.run(leave())
    held.clear()
