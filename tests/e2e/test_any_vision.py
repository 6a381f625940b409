"""Models without a path of their own, served over HTTP, and from their records.

Images are bidirectional in Gemma 3, so a chunk contains them completely.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from tests.e2e.asking import TEXTS, Ask, drawn_image
from tests.e2e.conftest import SETTINGS, assert_idle
from tests.parity.compare import expected, inputs_of_text, library_model, load_on
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.patience import PATIENCE_S
from vsched import Config
from vsched.api.server import RunningServer, running_server
from vsched.config import load_config
from vsched.record import replay

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.fixture(
    scope="module", params=["gemma3", pytest.param("llava", marks=pytest.mark.thorough)]
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
    assert report.events > 20


def generated(path: str, ask: Ask, spans: Sequence[Sequence[int]] | None) -> list[int]:
    """Greedy output of transformers' complete model; `spans` are the bidirectional spans of each image."""
    stage, model = load_on("cpu", path), library_model(path, sees=True)
    inputs = inputs_of_text(ask.prompt(stage.preprocessor))
    arrays = map(stage.preprocessor.process_image, ask.images)
    inputs["pixel_values"] = torch.cat([torch.tensor(each["pixel_values"]) for each in arrays])
    if "token_type_ids" in inspect.signature(model.model.forward).parameters:
        kinds = (inputs["input_ids"] == stage.info.placeholder).int()
        numbers = kinds.cumsum(1)
        for start, stop in spans or ():
            kinds += (numbers > start) & (numbers <= stop)
        inputs["token_type_ids"] = kinds if spans is None else (kinds > 1).int()
    return expected(model, inputs, ask.count).output


async def test_attention_spans_are_honoured(seeing: RunningServer, config: Config) -> None:
    """As `generate` with such a mask, whatever was cached before; a model of causal attention refuses them."""
    engine = seeing.engine
    ask = Ask(TEXTS[2], [drawn_image(5)], 24)
    tokens = ask.prompt(engine.preprocessor).count(engine.preprocessor.info.placeholder)
    assert tokens > 3
    answers = []
    async with httpx.AsyncClient(base_url=seeing.url, timeout=PATIENCE_S) as client:
        for spans in (None, [[1, tokens]], [[0, 2], [3, tokens]], [], [[0, tokens]]):
            image, text = ask.messages[0]["content"]
            message = {"role": "user", "content": [image | {"attention_spans": spans}, text]}
            body = {"messages": [message], "max_tokens": ask.count}
            body |= {"temperature": 0, "ignore_eos": True, "logprobs": True}
            response = await client.post("/v1/chat/completions", json=body)
            if spans is not None and not engine.info.item_atomic:
                assert response.json()["error"]["code"] == "attention_spans_not_taken"
                continue
            assert response.status_code == 200, response.text
            [choice] = response.json()["choices"]
            wanted = generated(config.model.path, ask, spans)
            assert choice["message"]["content"] == engine.preprocessor.detokenize(wanted)
            answers.append([each["logprob"] for each in choice["logprobs"]["content"]])
    if engine.info.item_atomic:
        default, *others, whole = answers
        assert whole == pytest.approx(default)
        for other in others:
            assert other != pytest.approx(default, rel=1e-4), "the spans make a difference"
