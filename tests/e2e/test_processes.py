"""Several processes that serve HTTP: the same responses, and deaths of one of them, or of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.commands import PLAIN, run_command
from tests.e2e.asking import TEXTS, Ask, answer, drawn_image
from tests.e2e.conftest import SETTINGS
from tests.e2e.serving import ServeProcess
from tests.e2e.test_grammars import CRASH, post_hostile
from tests.fuzz.documents import at_doors
from tests.patience import PATIENCE_S, patience, until
from tests.traces import is_alive, running
from vsched import Config, Engine
from vsched.api.processes import supervisor
from vsched.api.server import RunningServer, running_server
from vsched.errors import CheckpointError

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

ROOM = 'generate.memory={use="pinned", tokens=8192}'
ASK = Ask(TEXTS[1], [drawn_image(7000, (112, 84)), drawn_image(7001)], count=40)
LONG = Ask(TEXTS[2], count=400)
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def split(configure: Callable[..., Config]) -> AsyncIterator[RunningServer]:
    """A server of two processes next to the engine's."""
    async with running_server(configure("nano25", "server.processes=2", ROOM)) as running:
        yield running


def body(ask: Ask, **fields: Any) -> dict[str, Any]:
    exact = {"max_tokens": ask.count, "temperature": 0, "ignore_eos": True}
    return {"messages": ask.messages, **exact, **fields}


def owner(server_port: int, client_port: int, pids: Sequence[int]) -> int:
    """Return the process that has accepted a connection on this machine."""
    wanted = (f":{server_port:04X}", f":{client_port:04X}")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    inodes = {row[9] for row in rows if (row[1][8:], row[2][8:]) == wanted}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if link.readlink().name.removeprefix("socket:[").rstrip("]") in inodes:
                    return pid
    raise AssertionError("no process has accepted it")


@contextlib.asynccontextmanager
async def clients(server: RunningServer) -> AsyncIterator[dict[int, Any]]:
    """Yield a client of each process, by the process: the system chooses one, so clients connect until each has one."""
    port = int(server.url.rpartition(":")[2])
    found: dict[int, Any] = {}
    async with contextlib.AsyncExitStack() as opened, patience():
        while found.keys() != set(server.api_pids):
            client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)
            await opened.enter_async_context(client)
            health = await client.get("/health")
            assert health.status_code == 200
            own = health.extensions["network_stream"].get_extra_info("client_addr")[1]
            found.setdefault(owner(port, own, server.api_pids), client)
        yield found


async def said(response: Any) -> AsyncIterator[str]:
    """Yield the text of each event of a stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


async def test_processes_answer_as_the_engine_does(split: RunningServer) -> None:
    """The same tokens from each, streaming or not, with images; each request is counted once, on any process.

    Grammars that crash the grammar library end nothing.
    """
    wanted = await answer(split.engine, ASK)
    await post_hostile(split.url, [at_doors(CRASH)["guided"]])
    async with clients(split) as found:
        assert len(found) == 2
        for client in found.values():
            whole = (await client.post(CHAT, json=body(ASK, return_token_ids=True))).json()
            assert whole["choices"][0]["token_ids"] == wanted.token_ids
            assert whole["usage"]["prompt_tokens"] == len(ASK.prompt(split.engine.preprocessor))
            async with client.stream("POST", CHAT, json=body(ASK, stream=True)) as response:
                assert "".join([text async for text in said(response)]) == wanted.text
            constrained = {"model": "nano25", "prompt": "1", "guided_regex": "ab"}
            reply = (await client.post("/v1/completions", json=constrained)).json()
            assert reply["choices"][0]["text"] == "ab"
        for client in found.values():
            assert await answered(client, least=4) == 4
        adapters = [(await client.get("/admin/adapters")).json() for client in found.values()]
        assert adapters[0] == adapters[1]
    assert split.engine.statistics()["running"] == 0


async def test_process_that_dies_takes_only_its_own_requests(split: RunningServer) -> None:
    """In mid-stream: streams of the other go on, the engine ends the streams of the dead one, and it is restarted."""
    wanted = await answer(split.engine, LONG)
    async with clients(split) as found, contextlib.AsyncExitStack() as opened:
        dead, alive = found
        for client in found.values():
            assert (await client.post(CHAT, json=body(ASK))).status_code == 200
        await asyncio.sleep(1.5)  # each process reports once a second
        before = await answered(found[alive])
        streams = {}
        for pid, client in found.items():
            stream = client.stream("POST", CHAT, json=body(LONG, stream=True))
            streams[pid] = said(await opened.enter_async_context(stream))
            await anext(streams[pid])
        with standing_still(split.engine.rank_pids):
            assert split.engine.statistics()["running"] == 2, "both are still being answered"
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                _ = [text async for text in streams[dead]]
        assert "".join([text async for text in streams[alive]]) == wanted.text
        assert alive in split.api_pids
    await until(lambda: not split.engine.statistics()["running"])
    await until(lambda: len(split.api_pids) == 2, "it is restarted")
    assert dead not in split.api_pids
    async with clients(split) as found:
        for client in found.values():
            assert (await client.post(CHAT, json=body(ASK))).status_code == 200
        after = await answered(found[alive], least=before + 3)
    assert after == before + 3, "counts of the dead process are kept"


async def answered(client: Any, *, least: float = 0) -> float:
    """Return the number of requests that were answered at their full length, once it is at least this."""
    pattern = r'vsched_requests_total{endpoint="chat",model_name="[^"]*",outcome="length"} (.*)'
    for _ in range(100):  # each process reports once a second
        count = sum(map(float, re.findall(pattern, (await client.get("/metrics")).text)))
        if count >= least:
            break
        await asyncio.sleep(0.1)
    return count


@pytest.mark.thorough
async def test_process_that_stands_still_is_replaced(
    split: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link is never closed; only its silence shows the failure."""
    dead, _ = split.api_pids
    os.kill(dead, signal.SIGSTOP)
    monkeypatch.setattr(supervisor, "SILENT_S", 3.0)
    await until(lambda: dead not in split.api_pids)
    monkeypatch.undo()
    await until(lambda: len(split.api_pids) == 2)
    async with clients(split) as found:
        assert dead not in found


async def test_processes_answer_before_the_engine_is_ready_and_end_where_it_never_is(
    configure: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They listen from the start; an engine that cannot start ends them, too."""
    requested = asyncio.Event()

    async def start(_: Engine) -> None:
        await requested.wait()
        raise CheckpointError("corrupt")

    monkeypatch.setattr(Engine, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = configure("nano25", "server.processes=2", f"server.port={port}")
    before = set(running())

    async def serve() -> None:
        async with running_server(settings):
            raise AssertionError("it runs")

    serving = asyncio.create_task(serve())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        health = None
        async with patience():
            while health is None:
                with contextlib.suppress(httpx.ConnectError):
                    health = await client.get("/health")
        refused = await client.post(CHAT, json=body(ASK))
    assert (health.status_code, refused.status_code) == (503, 503)
    assert refused.json()["error"]["code"] == "not_ready"
    requested.set()
    with pytest.raises(CheckpointError, match="corrupt"):
        await serving
    await until(lambda: not any(map(is_api, set(running()) - before)))


@contextlib.contextmanager
def standing_still(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes with SIGSTOP during the body."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def is_api(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8").startswith("vsched: api")
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_processes_end_with_the_engine(
    checkpoints: Callable[[str], Path], tmp_path: Path, number: signal.Signals
) -> None:
    """After SIGTERM, responses in progress are completed; after SIGKILL, their last event is an error, not silence."""
    asked = body(Ask(TEXTS[2], count=1500), stream=True)
    sets = [*SETTINGS, ROOM, "server.processes=2", f"record.path={tmp_path / 'run.vlog'}"]
    with ServeProcess(checkpoints("nano25"), settings=sets) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            pids = [pid for pid in served.children if is_api(pid)]
            async with client.stream("POST", CHAT, json=asked) as response:
                lines = response.aiter_lines()
                await anext(lines)
                served.process.send_signal(number)
                events = [json.loads(one[6:]) async for one in lines if one.startswith("data: {")]
        assert len(pids) == 2
        await until(lambda: not any(map(is_alive, pids)), "they end")
        with pytest.raises(httpx.ConnectError):
            await asyncio.to_thread(httpx.get, f"{served.url}/health")
        if number == signal.SIGKILL:
            assert events[-1]["error"]["code"] == "stopping"
            return
        assert await asyncio.to_thread(served.process.wait, PATIENCE_S) == 0
    assert not any("error" in event for event in events)
    assert len(events) >= 1498
    reported = run_command("replay", tmp_path / "run.vlog", env=PLAIN)
    assert "Everything was decided the same again." in reported
