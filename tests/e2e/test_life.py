"""Starting, failing to start, draining and stopping: clear errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, read
from tests.e2e.serving import ServeProcess
from tests.patience import PATIENCE_S, until
from tests.traces import is_alive, traces
from tests.unit.rank.fake_plugin import NAME, Behaviour
from vsched import Config, Engine
from vsched.config import load_config
from vsched.errors import ConfigError, RequestRefused

pytestmark = pytest.mark.asyncio(loop_scope="package")

Checkpoints = Callable[[str], Path]
Configure = Callable[..., Config]


async def test_temporary_folder_that_cannot_hold_sockets_is_an_error(
    configure: Configure, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a Unix socket is limited to about a hundred characters; containers may be read-only."""
    (folder := temporary / ("x" * 100)).mkdir()
    for name, text in (
        (folder.name, r"value \d+, limit \d+ characters"),
        ("none", "cannot be created"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(temporary / name))
        with pytest.raises(ConfigError, match=f"{text}.* Remedy: set TMPDIR"):
            await Engine(configure("nano25")).start()
    folder.rmdir()  # fails unless it is empty


async def test_start_ends_before_weights_are_loaded_if_the_tokenizer_cannot_be(
    temporary: Path,
) -> None:
    path = msgspec.json.encode(Behaviour(load_s=1000)).decode()
    sets = [f"model.path={path}", "encode.replicas=0", "deadlines.ready_s=10"]
    config = load_config(None, sets=[*sets, f"generate.plugin={NAME}"], environ={}).config
    with pytest.raises(NotImplementedError):  # after 10 s it would be the ranks' deadline
        await Engine(config).start()
    assert not traces(temporary).files


@pytest.mark.slow
async def test_stopped_engine_leaves_nothing(configure: Configure, temporary: Path) -> None:
    """Live requests finish, new ones are refused, and then there is no process, no file and no memory."""
    engine = Engine(configure("nano3"))
    with pytest.raises(RequestRefused, match="loading"):
        await engine.generate(prompt="early", request_id="early")
    await engine.start()
    assert len(traces(temporary).files) > 0
    started = [
        await begin(engine, Ask(TEXTS[n], [drawn_image(5000 + n)], count=80)) for n in range(4)
    ]
    pids = engine.rank_pids
    draining = asyncio.create_task(engine.drain())
    await until(lambda: engine.state == "draining", "draining begins")
    with pytest.raises(RequestRefused) as caught:
        await begin(engine, Ask())
    assert (caught.value.code, caught.value.status) == ("draining", 503)
    await draining
    assert [len((await read(one)).token_ids) for one in started] == [80] * 4
    await engine.stop()
    await engine.stop()
    assert engine.state == "stopped"
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(RequestRefused, match="stopped"):
        await begin(engine, Ask())


@pytest.mark.slow
async def test_interrupted_server_drains(checkpoints: Checkpoints, temporary: Path) -> None:
    """One Ctrl-C: the running response is completed, and the process exits with 0."""
    body = {"prompt": "Count.", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with ServeProcess(checkpoints("nano25")) as server:
        url = await asyncio.to_thread(lambda: server.url)
        children = server.children
        assert len(children) == 4, "two ranks, and the fork servers of ranks and of images"
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            server.process.send_signal(signal.SIGINT)
            *_, last, done = [line async for line in lines if line]
        assert done == "data: [DONE]"
        assert '"finish_reason":"length"' in last
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
        await until(lambda: not any(map(is_alive, children)), "they end")
