"""Models without a path of their own, served: over HTTP, with a killed rank, and from their records.

Images are bidirectional in Gemma 3, whole prompts in PaliGemma, so a chunk contains them completely.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText

httpx = pytest.importorskip("httpx")

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, now_and_then, read  # noqa: E402
from tests.e2e.conftest import SETTINGS, assert_idle  # noqa: E402
from tests.parity.vision_checkpoints import make_vision_checkpoint  # noqa: E402
from tests.patience import PATIENCE_S, until  # noqa: E402
from vsched import Config, SamplingParams  # noqa: E402
from vsched.api.server import RunningServer, running_server  # noqa: E402
from vsched.config import load_config  # noqa: E402
from vsched.record import replay  # noqa: E402
from vsched.sim.cost.model import load_cost_model  # noqa: E402
from vsched.sim.fast.simulation import simulate  # noqa: E402
from vsched.sim.workload.requests import Arrival, Image, Text, workload_of  # noqa: E402
from vsched.worker.contract import Preprocessor  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OUTPUTS = 60
ASKS = [
    Ask("What is it?", [drawn_image(1)], OUTPUTS),
    Ask("And these?", [drawn_image(2, (33, 64)), drawn_image(3, (112, 40))], OUTPUTS),
    Ask("No picture here.", [], OUTPUTS),
    Ask("The first again?", [drawn_image(1)], OUTPUTS),
]


@pytest.fixture(
    scope="module",
    params=["llava", "gemma3", pytest.param("paligemma", marks=pytest.mark.thorough)],
)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("seeing") / request.param
    make_vision_checkpoint(request.param, path)
    sets = [one for one in SETTINGS if not one.startswith("generate.context_tokens")]
    sets += [f"model.path={path}", "model.name=seeing", f"record.path={path.parent / 'run.vlog'}"]
    sets.append("generate.chunk_tokens=3")  # fewer than an image has
    return load_config(None, sets=sets, environ={}).config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(config: Config) -> AsyncIterator[RunningServer]:
    async with running_server(config) as running:
        yield running
        await assert_idle(running.engine)
    report = replay(Path(config.record.path))
    assert report.difference is None
    assert report.events > 50


@torch.inference_mode()
def generated(
    path: Path,
    preprocessor: Preprocessor,
    asks: Sequence[Ask],
    attention: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Greedy outputs of transformers' complete model; `attention` has the spans of each image."""
    made: Any = AutoModelForImageTextToText
    model = made.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for ask in asks:
        ids = torch.tensor([ask.prompt(preprocessor)])
        kinds: dict[str, torch.Tensor] = {}
        if "token_type_ids" in inspect.signature(model.model.forward).parameters:
            # In PaliGemma, token type 1 marks the part after the bidirectional prefix.
            prefix = preprocessor.info.prompt_atomic
            kinds["token_type_ids"] = (
                torch.zeros_like(ids) if prefix else (ids == preprocessor.info.placeholder).int()
            )
            if attention is not None:
                numbers = kinds["token_type_ids"].cumsum(1)
                inside = torch.zeros_like(numbers)
                for start, stop in attention:
                    inside |= ((numbers > start) & (numbers <= stop)).int()
                kinds["token_type_ids"] *= inside
        pictures = [
            torch.from_numpy(preprocessor.process_image(image)["pixel_values"].copy())
            for image in ask.images
        ]
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **({"pixel_values": torch.cat(pictures)} if pictures else {}),
            **kinds,
            **options,
            max_new_tokens=ask.count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def wanted(seeing: RunningServer, config: Config) -> list[list[int]]:
    found = generated(Path(config.model.path), seeing.engine.preprocessor, ASKS)
    assert found[0] != found[1]
    return found


async def test_a_chat_about_an_image_is_answered_as_generate_does(
    seeing: RunningServer, wanted: list[list[int]]
) -> None:
    options = {"model": "seeing", "temperature": 0, "max_tokens": OUTPUTS, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=seeing.url, timeout=PATIENCE_S) as client:
        for ask, tokens in zip(ASKS, wanted, strict=True):
            body = {"messages": ask.messages, **options}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            text = response.json()["choices"][0]["message"]["content"]
            assert text == seeing.engine.preprocessor.detokenize(tokens)


async def test_attention_spans_are_honoured_or_refused(
    seeing: RunningServer, config: Config
) -> None:
    """As `generate` with such a mask, whatever was cached before; in a model of causal attention, a 400."""
    preprocessor = seeing.engine.preprocessor
    ask = Ask(TEXTS[2], [drawn_image(5)], 24)
    tokens = ask.prompt(preprocessor).count(preprocessor.info.placeholder)
    assert tokens > 3
    answers = []
    async with httpx.AsyncClient(base_url=seeing.url, timeout=PATIENCE_S) as client:
        for spans in (None, [[1, tokens]], [[0, 2], [3, tokens]], [], [[0, tokens]]):
            [message] = ask.messages
            content = [
                part | {"attention_spans": spans} if part["type"] == "image_url" else part
                for part in message["content"]
            ]
            body = {"messages": [message | {"content": content}], "max_tokens": ask.count}
            body |= {"temperature": 0, "ignore_eos": True, "logprobs": True}
            response = await client.post("/v1/chat/completions", json=body)
            if spans is not None and not seeing.engine.info.item_atomic:
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["code"] == "attention_spans_not_taken"
                assert error["message"].startswith(
                    "image 0: attention_spans cannot be set: the model"
                )
                continue
            assert response.status_code == 200, response.text
            [choice] = response.json()["choices"]
            wanted = generated(Path(config.model.path), preprocessor, [ask], spans)
            assert choice["message"]["content"] == preprocessor.detokenize(wanted[0])
            answers.append([each["logprob"] for each in choice["logprobs"]["content"]])
    if seeing.engine.info.item_atomic:
        default, *others, whole = answers
        assert whole == pytest.approx(default)
        for other in others:
            assert other != pytest.approx(default, rel=1e-4), "the spans make a difference"


class SecondTurn(Ask):
    """A question, an answer to it, and another question."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        answer = {"role": "assistant", "content": "A cat."}
        return [*super().messages, answer, {"role": "user", "content": "Are you sure?"}]


async def test_the_next_turn_finds_the_turn_before_if_that_is_right(
    seeing: RunningServer, config: Config
) -> None:
    """All its full blocks, with its image; none if their content depends on later tokens."""
    engine = seeing.engine
    turns = [Ask(TEXTS[1], [drawn_image(4)], 8), SecondTurn(TEXTS[1], [drawn_image(4)], OUTPUTS)]
    wanted = generated(Path(config.model.path), engine.preprocessor, turns)
    reported = []
    options = {"model": "seeing", "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=seeing.url, timeout=PATIENCE_S) as client:
        for turn, tokens in zip(turns, wanted, strict=True):
            body = {"messages": turn.messages, "max_tokens": turn.count, **options}
            response = (await client.post("/v1/chat/completions", json=body)).json()
            text = response["choices"][0]["message"]["content"]
            assert text == engine.preprocessor.detokenize(tokens)
            usage = response["usage"]
            reported.append(
                (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
            )
    (first, _), (second, cached) = reported
    assert second > first > 6 * config.generate.block_size
    if engine.info.prompt_atomic:
        assert cached == 0
    else:
        assert first - config.generate.block_size < cached <= first


@pytest.mark.parametrize("killed", [0, 1])
async def test_a_killed_rank_loses_no_token(
    seeing: RunningServer, wanted: list[list[int]], killed: int
) -> None:
    """For a rank that encodes and for one that generates."""
    engine = seeing.engine
    started = [await begin(engine, ask) for ask in ASKS]
    await until(lambda: sum(one.output_tokens for one in started) > 20, "streams are running")
    assert any(one.reason is None for one in started), "too late to lose anything"
    os.kill(sorted(engine.rank_pids)[killed], signal.SIGKILL)
    found = await asyncio.gather(*(read(one) for one in started))
    assert [one.token_ids for one in found] == wanted
    await until(lambda: engine.state == "ready", "the lost group is back")


async def test_simulation_takes_the_model_as_it_is_served(
    seeing: RunningServer, config: Config
) -> None:
    """No chunk splits a span that must stay whole, and each request ends."""
    info, cost = seeing.engine.info, load_cost_model("tiny25")
    arrivals = [
        Arrival(
            at_ns=n * 5_000_000,
            request_id=f"r{n}",
            prompt=(Text(1, 20), Image(f"image {n % 3}", info.item_tokens_max), Text(10 + n, 20)),
            output_tokens=40,
        )
        for n in range(8)
    ]
    workload = workload_of("pictures", arrivals)
    figures = simulate(config, workload, cost=cost, info=info, oracles=True).figures
    assert (figures.finished, figures.failed, figures.images) == (8, {}, 8)
    assert figures.images_encoded == 3
    assert (figures.prefix_hits > 0) == (not info.prompt_atomic)


async def test_a_sampled_placeholder_stands_for_no_image(
    seeing: RunningServer, config: Config
) -> None:
    """Image positions come from the prompt, not from ids, even when outputs are recomputed as context."""
    engine, ask = seeing.engine, ASKS[0]
    placeholder = engine.info.placeholder

    def say(bias: float) -> list[int]:
        reported: dict[str, Any] = {"sequence_bias": {(placeholder,): bias}}
        return generated(Path(config.model.path), engine.preprocessor, [ask], **reported)[0]

    bias, tokens = now_and_then(placeholder, say)
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=OUTPUTS, logit_bias=((placeholder, bias),)
    )
    started = await begin(engine, ask, sampling)
    await until(lambda: started.output_tokens > OUTPUTS // 2, "the stream is running")
    os.kill(sorted(engine.rank_pids)[1], signal.SIGKILL)
    assert (await read(started)).token_ids == tokens
    await until(lambda: engine.state == "ready", "the lost group is back")
