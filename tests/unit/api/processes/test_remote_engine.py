"""Requests of an API process reach the kernel like any others, and have one end on both sides.

The process's engine and the engine's session are joined without sockets, over a real shell and simulated ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from tests.patience import patience
from tests.unit.aio.ranks import SEPARATE, ShellHarness
from tests.unit.media.fakes import FakePreprocessor, model_info
from vsched.aio.streams import OutputDelta, TokenStream
from vsched.api.app import create_operations
from vsched.api.contract import ApiSettings
from vsched.api.metrics import ApiMetrics
from vsched.api.processes import process_main as remote_engine_module
from vsched.api.processes.link import Link
from vsched.api.processes.process_main import RemoteEngine
from vsched.api.processes.supervisor import ProcessSession
from vsched.config import Config, MediaConfig
from vsched.engine import Engine
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.events import Aborted, Arrived, Cleared, Event, Submitted, Withdrawn
from vsched.media import MediaPipeline, PixelStore
from vsched.policy import Admit, ArrivalDecision, ArrivalView, RequestPolicy, Shed
from vsched.record.journal import PartialOutput, prompt_digest
from vsched.types import FinishReason, Request, SamplingParams

PREPARING_MAX = 2


class Wire(Link):
    """Stands for both ends of a link in one direction: frames are delivered, unless the wire is held or cut."""

    def __init__(self) -> None:
        super().__init__(on_lost=lambda _: None)
        self.sent: list[Any] = []
        self.held = False
        self.cut = False
        self._waiting: list[bytes] = []

    def _send(self, frame: bytes) -> None:
        if self.cut:
            return
        self.sent += msgspec.msgpack.decode(frame)
        if self.held:
            self._waiting.append(frame)
        else:
            self.receive(frame)

    def let_go(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self.receive(frame)


class Joined:
    """One API process and its engine.

    Attributes:
        up: From the process to the engine.
        down: From the engine to the process.
    """

    session: ProcessSession
    remote: RemoteEngine

    def __init__(self, played: ShellHarness) -> None:
        self.played = played
        self.engine: Engine = played.engine()
        self.engine.info = model_info(context_tokens=64)
        self.engine.preprocessor = FakePreprocessor(self.engine.info)
        store = PixelStore(memoryview(bytearray()))
        settings = MediaConfig(preparing_max=PREPARING_MAX)
        assert self.engine._running is not None
        self.media = MediaPipeline(self.engine.preprocessor, store, settings)
        adapters = SimpleNamespace(rows=list)
        self.engine._running = dataclasses.replace(
            self.engine._running, media=self.media, adapters=cast("Any", adapters)
        )
        self.up, self.down = Wire(), Wire()
        operations = create_operations(self.engine, ApiSettings(), ApiMetrics(self.engine))
        self.session = ProcessSession(self.engine, self.down, operations=operations)
        self.remote = RemoteEngine("demo", self.up)
        self.up.receivers, self.down.receivers = (self.session,), (self.remote,)

    async def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the process load with the engine's facts."""
        load = Mock(return_value=(FakePreprocessor(self.engine.info), False))
        monkeypatch.setattr(remote_engine_module, "load_worker", lambda *_, **__: None)
        monkeypatch.setattr(remote_engine_module, "load_front_end", load)
        monkeypatch.setattr(remote_engine_module, "grammar_processes", lambda *_: None)
        self.down.call("served", Config(), self.engine.info)
        self.session.send_status()
        await self.remote.load()

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Number of live requests in the kernel, in the session, and in the process: all 0 in the end."""
        reported = self.played.shell.statistics()
        session = len(self.session._arriving) + len(self.session._live)
        remote = self.remote
        known = len(remote._pending) + len(remote._choices) + len(remote._streams._by_number)
        return reported["running"] + reported["waiting"], session, known

    async def turns(self, count: int = 12) -> None:
        """Let the loop turn a few times: long enough for any message, since all parts share this process."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def read(self, stream: TokenStream) -> list[OutputDelta]:
        """Let the ranks compute, and return the deltas of one choice."""
        reading = asyncio.ensure_future(_deltas(stream))
        for _ in range(1000):
            if reading.done():
                break
            self.played.ranks.run(1)
            await self.turns(3)
        assert reading.done(), "it has no end"
        return await reading


async def _deltas(stream: TokenStream) -> list[OutputDelta]:
    return [delta async for delta in stream]


@pytest.fixture
async def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ShellHarness]:
    played = ShellHarness(monkeypatch, tmp_path)
    await played.start(SEPARATE)
    yield played
    await played.close()


@pytest.fixture
async def joined(played: ShellHarness, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Joined]:
    """Whatever happens, no request is left in the kernel, in the session, or in the process."""
    made = Joined(played)
    await made.load(monkeypatch)
    yield made
    await made.turns()
    assert made.numbers == (0, 0, 0) or made.up.cut
    made.media.close()


@pytest.fixture
def events(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The kernel's events about requests."""
    received: list[Event] = []
    handle = joined.played.shell.kernel.handle
    kinds = (Arrived, Submitted, Withdrawn, Aborted, Cleared)

    def note(event: Event, now_ns: int) -> Any:
        if isinstance(event, kinds):
            received.append(event)
        return handle(event, now_ns)

    monkeypatch.setattr(joined.played.shell.kernel, "handle", note)
    return received


def ask(
    engine: Any, prompt: Any = "hello", *, names: tuple[str, ...] = ("r",), **options: Any
) -> Any:
    """Ask for choices of a prompt; `options` are of the sampling, or `started` and `make_stop_scope`."""
    others = {name: options.pop(name, None) for name in ("started", "make_stop_scope")}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **options})
    return engine.generate_choices(
        prompt=prompt, images=(), sampling=sampling, request_ids=names, tenant="t", **others
    )


def tokens_of(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_subscriber_gets_the_end_and_times_of_an_aborted_answer(joined: Joined) -> None:
    """Traces need both, after the client has left."""
    (far,) = await ask(joined.remote)
    far.abort()
    assert far.reason is None, "the engine has not ended it yet"
    reasons: list[FinishReason | None] = []
    far.subscribe(lambda: reasons.append(far.reason))
    await joined.turns()
    assert reasons[-1:] == [FinishReason.ABORT]
    assert 0 < far.times.submitted_ns <= far.times.finished_ns


async def test_remote_answer_goes_on_where_a_dead_engine_left_it(joined: Joined) -> None:
    """The process gets the tokens of the record before newly computed ones."""
    (whole,) = await ask(joined.engine, max_tokens=5)
    wanted = tokens_of(await joined.read(whole))
    prompt = [ord(one) for one in "hello"]
    requested = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams())
    started = PartialOutput(prompt_digest(requested), tuple(wanted[:3]))
    (rest,) = await ask(joined.remote, max_tokens=5, started=started)
    found = tokens_of(await joined.read(rest))
    assert found == wanted
    with pytest.raises(RequestRefused) as refused:
        await ask(joined.remote, "another", started=started)
    assert refused.value.code == "prompt_changed"


async def test_remote_answers_to_one_request_are_distinguished(joined: Joined) -> None:
    streams = await ask(joined.remote, names=("a", "b", "c"))
    for stream in streams:
        assert len(tokens_of(await joined.read(stream))) == 3
    assert [stream.request_id for stream in streams] == ["a", "b", "c"]


async def test_remote_prompt_is_prepared_once_admitted(joined: Joined, events: list[Event]) -> None:
    """The arrival policy decides first; a rejected request is never tokenized, and leaves nothing."""

    class Full(RequestPolicy, frozen=True, kw_only=True):
        def arrive(self, view: ArrivalView) -> ArrivalDecision:
            return Shed("full", 7) if view.request.tenant == "t" else Admit()

    joined.played.shell.kernel._gate._seat.ask = Full().arrive
    render = Mock(return_value="hello")
    with pytest.raises(RequestRefused) as refused:
        await ask(joined.remote, render)
    assert (refused.value.code, refused.value.retry_after_s) == ("shed", 7)
    render.assert_not_called()
    assert [name for name, _ in joined.up.sent] == ["admit"]


async def test_remote_refusals_of_both_sides_reach_the_client(joined: Joined) -> None:
    """A prompt that is too long is refused by the engine, unsupported prompt log-probabilities by the process."""
    with pytest.raises(RequestRefused) as late:
        await ask(joined.remote, [5] * 100)
    assert late.value.code == "context_exceeded"
    with pytest.raises(RequestRefused) as early:
        await ask(joined.remote, prompt_logprobs=1)
    assert "prompt" in early.value.message


async def test_remote_preparations_of_all_processes_have_one_limit(joined: Joined) -> None:
    """The engine counts them, whichever process tokenizes."""
    joined.up.held = True
    tasks = [asyncio.ensure_future(ask(joined.remote, names=(f"r{n}",))) for n in range(3)]
    await joined.turns()
    joined.up.let_go()
    joined.up.held = True  # no request is submitted any more
    await joined.turns()
    assert joined.media.statistics().preparing == PREPARING_MAX
    (done,) = [task for task in tasks if task.done()]
    assert done.exception().code == "queue_full"
    joined.up.let_go()
    async with patience():
        answered = await asyncio.gather(*tasks, return_exceptions=True)
    for streams in answered:
        if not isinstance(streams, BaseException):
            await joined.read(streams[0])
    assert joined.media.statistics().preparing == 0


@pytest.mark.parametrize(
    ("turns", "held"), [*((turns, False) for turns in (0, 1, 2, 3, 5, 8, 11)), (12, True)]
)
async def test_remote_client_that_leaves_early_leaves_nothing(
    joined: Joined, turns: int, held: bool, events: list[Event]
) -> None:
    """At any moment of its arrival: the session forgets it, and the kernel gets its end.

    Also where the engine reads both calls at once, so that the task of the request never starts.
    """
    joined.up.held = held
    task = asyncio.ensure_future(ask(joined.remote, max_tokens=50))
    await joined.turns(turns)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()[0].abort()
    await joined.turns()
    joined.up.let_go()
    await joined.turns()
    joined.played.ranks.run(2)
    ends = [one for one in events if isinstance(one, Aborted | Withdrawn)]
    assert len(ends) == sum(isinstance(one, Arrived) for one in events)
    assert not held or "submit" not in [name for name, _ in joined.up.sent]


@pytest.mark.parametrize("turns", [0, 12])
async def test_remote_client_that_leaves_before_its_acceptance_is_heard_of_harms_no_other(
    joined: Joined, turns: int, events: list[Event]
) -> None:
    """The engine has accepted it: its end is for no choice that the process knows."""
    (other,) = await ask(joined.remote, names=("other",), max_tokens=5)
    task = asyncio.ensure_future(ask(joined.remote, max_tokens=50))
    while "submit" not in [name for name, _ in joined.up.sent[3:]]:
        await joined.turns(1)
    joined.down.held = True
    await joined.turns()
    assert sum(isinstance(one, Submitted) for one in events) == 2
    task.cancel()
    await joined.turns(turns)
    joined.down.let_go()
    await joined.turns()
    assert task.cancelled()
    assert len(tokens_of(await joined.read(other))) == 5


async def test_remote_stop_string_ends_an_answer_there(joined: Joined, events: list[Event]) -> None:
    """The same text as in the engine's process, although the rank may be a token ahead by then."""
    (free,) = await ask(joined.engine, max_tokens=9)
    text = text_of(await joined.read(free))
    (near,) = await ask(joined.engine, max_tokens=9, stop=(text[4],))
    wanted = await joined.read(near)
    events.clear()
    (far,) = await ask(joined.remote, max_tokens=9, stop=(text[4],))
    found = await joined.read(far)
    assert text_of(found) == text_of(wanted) == text[:4]
    assert found[-1].finish_reason == wanted[-1].finish_reason == "stop"
    assert far.output_tokens == near.output_tokens
    assert [one.reason for one in events if isinstance(one, Aborted)] == [FinishReason.STOP]


class NowhereStops:
    """A scope in which no stop string counts."""

    def split(self, text: str) -> list[tuple[str, bool]]:
        return [(text, False)]

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        return [("", not cut)]


async def test_remote_and_engine_keep_stop_strings_to_their_scope(joined: Joined) -> None:
    """For example, for the tool calls of a choice."""
    for engine in (joined.engine, joined.remote):
        (free,) = await ask(engine, max_tokens=9)
        text = text_of(await joined.read(free))
        (held,) = await ask(engine, max_tokens=9, stop=(text[4],), make_stop_scope=NowhereStops)
        found = await joined.read(held)
        assert text_of(found) == text
        assert found[-1].finish_reason == "length"


async def test_remote_clear_ends_requests_in_preparation(joined: Joined) -> None:
    """As in the engine; the work of the process is interrupted, too."""
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def render() -> str:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return "hello"

    task = asyncio.ensure_future(ask(joined.remote, render))
    async with patience():
        await started.wait()
        await joined.engine.clear()
        with pytest.raises(RequestFailed) as failed:
            await task
    assert (failed.value.code, failed.value.status) == ("cleared", 503)
    go_on.set()


async def test_remote_engine_that_is_gone_ends_every_request_once(joined: Joined) -> None:
    (streaming,) = await ask(joined.remote, names=("streaming",), max_tokens=50)
    joined.up.held = True
    waiting = asyncio.ensure_future(ask(joined.remote, names=("waiting",)))
    metrics = {"method": "GET", "path": "/metrics", "query_string": b"", "headers": []}
    asking = asyncio.ensure_future(joined.remote.ask("forward", metrics, b""))
    await joined.turns()
    joined.remote.fail_requests("the engine has closed its link")
    for failing in (waiting, asking, joined.read(streaming), ask(joined.remote)):
        with pytest.raises(RequestFailed) as failed:
            await failing
        assert (failed.value.code, failed.value.status) == ("stopping", 503)
    assert joined.remote.state == "stopped"
    streaming.abort()
    joined.up.cut = True
    joined.session.close()
    await joined.turns()


async def test_remote_process_that_is_gone_frees_all(joined: Joined, events: list[Event]) -> None:
    """Running requests and those in flight; requests of other processes continue."""
    (other,) = await ask(joined.engine, names=("other",), max_tokens=5)
    await ask(joined.remote, names=("running",), max_tokens=50)
    joined.down.held = True  # it never learns that it may submit
    on_its_way = asyncio.ensure_future(ask(joined.remote, names=("on its way",)))
    await joined.turns()
    assert joined.media.statistics().preparing == 1
    joined.up.cut = joined.down.cut = True
    joined.session.close()
    await joined.turns()
    assert joined.media.statistics().preparing == 0
    assert [one.request_id for one in events if isinstance(one, Aborted)] == ["running"]
    assert len(tokens_of(await joined.read(other))) == 5
    assert joined.numbers[:2] == (0, 0)
    on_its_way.cancel()
    await asyncio.gather(on_its_way, return_exceptions=True)


async def test_remote_tokenizes_text_by_itself(joined: Joined) -> None:
    before = len(joined.up.sent)
    assert await joined.remote.tokenize("ab") == [97, 98]
    assert len(joined.up.sent) == before


async def test_remote_state_is_the_engine_s_once_all_is_loaded(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Joined(played)
    made.session.send_status()
    await made.turns()
    assert made.remote.state == "loading"
    await made.load(monkeypatch)
    assert made.remote.state == "ready"
    made.engine._state = "draining"
    made.session.send_status()
    made.session.send_status()
    await made.turns()
    assert made.remote.state == "draining"
    sent = [name for name, _ in made.down.sent]
    assert sent.count("status") == 2, "unchanged values are not reported"
    made.media.close()
