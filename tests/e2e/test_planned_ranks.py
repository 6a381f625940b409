"""Two ranks that share a model by transformers' plan, served: answers over HTTP, one rank killed, and the record.

The ranks of DeepSeek each keep the whole KV cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

httpx = pytest.importorskip("httpx")

from tests.e2e.conftest import SETTINGS, assert_idle  # noqa: E402
from tests.parity.architectures import make_checkpoint  # noqa: E402
from tests.parity.compare import generated, prompts  # noqa: E402
from tests.patience import PATIENCE_S, until  # noqa: E402
from vsched import Config  # noqa: E402
from vsched.api.server import RunningServer, running_server  # noqa: E402
from vsched.config import load_config  # noqa: E402
from vsched.record import replay  # noqa: E402

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.thorough,  # `tests/workers/parallel` compares such ranks, `test_groups.py` kills ranks of a group
]

OUTPUTS = 60
STREAMED = {"stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("shared") / "deepseek_v3"
    make_checkpoint("deepseek_v3", path)
    sets = [one for one in SETTINGS if not one.startswith("generate.context_tokens")]
    sets += [f"model.path={path}", "model.name=shared", f"record.path={path.parent / 'run.vlog'}"]
    sets.append("generate.tensor_parallel=2")
    return load_config(None, sets=sets, environ={}).config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(config: Config) -> AsyncIterator[RunningServer]:
    async with running_server(config) as running:
        yield running
        await assert_idle(running.engine)
    report = replay(Path(config.record.path))
    assert report.difference is None
    assert report.events > 50


async def test_two_ranks_answer_as_generate_and_one_that_is_killed_costs_no_token(
    shared: RunningServer, config: Config
) -> None:
    """Streams in progress have neither a gap nor a repeated token."""
    engine = shared.engine
    wanted = generated(Path(config.model.path), prompts(), outputs=OUTPUTS)
    assert len(engine.rank_pids) == 2
    counts = [0] * len(wanted)

    async def ask(index: int, prompt: list[int]) -> str:
        body = {"model": "shared", "prompt": prompt, "temperature": 0, "max_tokens": OUTPUTS}
        text = ""
        async with (
            httpx.AsyncClient(base_url=shared.url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body | STREAMED) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    counts[index] += 1
        return text

    asking = [asyncio.create_task(ask(index, one)) for index, one in enumerate(prompts())]
    await until(lambda: sum(counts) > 20, "streams are running")
    assert not any(one.done() for one in asking), "too late to lose anything"
    held = engine.statistics()["ledger"]["in_use"]["kv"]
    blocks = engine.statistics()["generate"]["blocks_held"]
    assert held == 2 * blocks * config.generate.block_size * engine.info.kv_bytes_per_token > 0
    os.kill(sorted(engine.rank_pids)[1], signal.SIGKILL)
    said = await asyncio.gather(*asking)
    assert said == [engine.preprocessor.detokenize(tokens) for tokens in wanted]
    await until(lambda: engine.state == "ready", "the lost group is back")
    again = await asyncio.gather(*(ask(index, one) for index, one in enumerate(prompts())))
    assert again == said
    (group,) = engine.groups()
    assert len(group["ranks"]) == 2
