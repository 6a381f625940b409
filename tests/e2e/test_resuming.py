"""The engine dies: another one resumes its requests, and clients read them to their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import TEXTS, Ask, answer, data_url, drawn_image, read
from tests.e2e.conftest import SETTINGS
from tests.e2e.serving import ServeProcess
from tests.patience import PATIENCE_S, patience, until
from tests.traces import is_alive
from vsched import Engine, RequestRefused, SamplingParams
from vsched.record.journal import PartialOutput, folder_of, prompt_digest
from vsched.types import Request

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], count=40)


async def go_on(engine: Engine, token_ids: list[int], sampling: SamplingParams) -> Any:
    """Resume a request after tokens that it has."""
    prompt = engine.preprocessor.render(ASK.messages)
    prompt_token_ids = engine.preprocessor.tokenize(prompt)
    request = Request(request_id="", prompt_token_ids=prompt_token_ids)
    async with patience():
        (stream,) = await engine.generate_choices(
            prompt=prompt,
            sampling=sampling,
            request_ids=("resumed",),
            started=PartialOutput(prompt_digest(request), tuple(token_ids)),
        )
    return await read(stream)


async def test_answer_ends_at_a_stop_string_among_the_tokens_that_it_had(engine: Engine) -> None:
    """The engine died after the token that completes it, before it could end the request."""
    whole = await answer(engine, ASK)
    stop = whole.text[len(whole.text) // 3 :][:2]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, stop=(stop,))
    stopped = await answer(engine, ASK, sampling)
    assert stopped.finish_reason == "stop"
    resumed = await go_on(engine, stopped.token_ids, sampling)
    assert (resumed.text, resumed.finish_reason) == (stopped.text, "stop")


async def test_tokens_that_no_model_has_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match="a token id"):
        await go_on(engine, [1 << 30], SamplingParams(temperature=0.0, max_tokens=40))


# --- a server is killed, and started again ---

COUNT = 240
CHAT = "/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": data_url(drawn_image(77))}}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"messages": [{"role": "user", "content": "Count."}], "temperature": 0.0}),
    "drawn": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [PICTURE, {"type": "text", "text": "What is this?"}]}
            ],
            "seed": 5,
            "frequency_penalty": 0.2,
        },
    ),
    "plain": ("/v1/completions", {"prompt": "0 1 2 3 4", "seed": 9}),
    "responses": ("/v1/responses", {"input": "Tell me more.", "temperature": 0.0}),
}
"""By the id that the client gives."""


def serve(checkpoint: Path, record: Path, port: int = 0) -> ServeProcess:
    """Start a server with a record and a journal."""
    sets = [*SETTINGS, f"server.port={port}"]
    return ServeProcess(checkpoint, "--record", str(record), "--resume", settings=sets)


async def follow(
    url: str, lines: list[str], path: str, body: dict[str, Any] | None = None, name: str = ""
) -> list[str]:
    """Add the lines of a response as they come; none after the server is gone."""
    headers = {"x-request-id": name} if name else {}
    method = "GET" if body is None else "POST"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        with contextlib.suppress(httpx.TransportError):
            async with client.stream(method, path, json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - each as it comes
    return lines


def requested(name: str) -> tuple[str, dict[str, Any]]:
    path, fields = QUESTIONS[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return path, {**fields, limit: COUNT, "stream": True, "ignore_eos": True}


def reported(lines: list[str]) -> list[dict[str, Any]]:
    """Return the events of a stream without fields that differ between requests."""
    events = []
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            events.append(_without_ids(event))
    return events


def _without_ids(value: Any) -> Any:
    varying = ("id", "item_id", "created", "created_at", "cached_tokens", "prompt_tokens_details")
    if isinstance(value, dict):
        return {key: _without_ids(each) for key, each in value.items() if key not in varying}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def kept(record: Path) -> list[Path]:
    """Return the files of requests without an end."""
    return list(folder_of(record).iterdir())


def event_ids(lines: list[str]) -> list[int]:
    return [int(line[4:]) for line in lines if line.startswith("id: ")]


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
async def test_killed_server_goes_on_with_its_streams(
    checkpoints: Callable[[str], Path], tmp_path: Path, temporary: Path
) -> None:
    """In float32 each client gets the events of an undisturbed stream, and one end.

    The second server starts at once, on the same port, while the ranks of the first may still be there.
    """
    checkpoint, record = checkpoints("nano25"), tmp_path / "run.vlog"
    servers = [serve(checkpoint, record)]
    try:
        first = servers[0]
        url = await asyncio.to_thread(lambda: first.url)
        plain = [follow(url, [], *requested(name)) for name in QUESTIONS]
        undisturbed = map(reported, await asyncio.gather(*plain))
        await until(lambda: not kept(record), "delivered requests are forgotten")
        had: dict[str, list[str]] = {name: [] for name in QUESTIONS}
        following = [
            asyncio.create_task(follow(url, lines, *requested(name), name))
            for name, lines in had.items()
        ]
        await until(lambda: all(len(event_ids(one)) > 20 for one in had.values()), "all have begun")
        ranks = first.children
        first.kill()
        servers.append(serve(checkpoint, record, int(url.rpartition(":")[2])))
        await asyncio.gather(*following)
        assert not any("[DONE]" in line for lines in had.values() for line in lines)
        second = servers[1]
        url = await asyncio.to_thread(lambda: second.url)
        assert not any(map(is_alive, ranks))
        left = "4 requests were left by a server that died: 4 go on"
        assert any(left in line for line in second.log)
        for name, events in zip(QUESTIONS, undisturbed, strict=True):
            path, _ = QUESTIONS[name]
            last = event_ids(had[name])[-1]
            complete = [line for line in had[name] if line.startswith("data: ")]
            rest = await follow(url, [], f"{path}/{name}?starting_after={last}")
            assert event_ids(rest)[0] == last + 1
            resumed = [*complete[: last + 1], *rest]
            assert reported(resumed) == events
            assert sum("[DONE]" in line for line in resumed) == (path != "/v1/responses")
        await until(lambda: not kept(record), "delivered requests are forgotten")
    finally:
        for one in servers:
            one.kill()
    await until(lambda: not any(temporary.iterdir()), "the children of killed servers clean up")
