"""Models without a path of their own, served: over HTTP, with a killed rank, and from their records.

Images are bidirectional in Gemma 3, so a chunk contains them completely.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText

httpx = pytest.importorskip("httpx")

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image  # noqa: E402
from tests.e2e.conftest import SETTINGS, assert_idle  # noqa: E402
from tests.e2e.losing import answers_over_a_kill  # noqa: E402
from tests.parity.vision_checkpoints import make_vision_checkpoint  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402
from vsched import Config  # noqa: E402
from vsched.api.server import RunningServer, running_server  # noqa: E402
from vsched.config import load_config  # noqa: E402
from vsched.record import replay  # noqa: E402
from vsched.worker.contract import Preprocessor  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OUTPUTS = 30
ASKS = [
    Ask("What is it?", [drawn_image(1)], OUTPUTS),
    Ask("And these?", [drawn_image(2, (33, 64)), drawn_image(3, (112, 40))], OUTPUTS),
    Ask("No picture here.", [], OUTPUTS),
    Ask("The first again?", [drawn_image(1)], OUTPUTS),
]


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
    assert report.events > 50


@torch.inference_mode()
def generated(
    path: Path,
    preprocessor: Preprocessor,
    asks: Sequence[Ask],
    attention: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Greedy outputs of transformers' complete model; `attention` has the spans of each image."""
    made: Any = AutoModelForImageTextToText
    model = made.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for ask in asks:
        ids = torch.tensor([ask.prompt(preprocessor)])
        kinds: dict[str, torch.Tensor] = {}
        if "token_type_ids" in inspect.signature(model.model.forward).parameters:
            kinds["token_type_ids"] = (ids == preprocessor.info.placeholder).int()
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
            max_new_tokens=ask.count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


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


async def test_a_killed_rank_loses_no_token(seeing: RunningServer, config: Config) -> None:
    engine = seeing.engine
    wanted = generated(Path(config.model.path), engine.preprocessor, ASKS)
    assert wanted[0] != wanted[1]
    started = [await begin(engine, ask) for ask in ASKS]
    found = await answers_over_a_kill(engine, started, engine.rank_pids[1])
    assert [one.token_ids for one in found] == wanted
