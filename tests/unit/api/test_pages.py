"""The live page and its state, and the document of the API: they are complete, and need no other host."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import vsched.api
from tests.each_case import each_case
from tests.unit.api.fakes import Client, FakeEngine, ask
from vsched.aio.live import LiveState
from vsched.api import ApiSettings, create_app
from vsched.api.openapi import ApiRoute
from vsched.api.page import PAGE_PATHS
from vsched.api.request_schema import ChatRequest
from vsched.policy import Admission, AdmissionView, RequestPolicy, StepShares, StepView
from vsched.sim.cluster import SimEngine

STATIC = Path(vsched.api.__file__).parent / "static"
BODY = {"prompt": "1 2 3", "max_tokens": 40, "ignore_eos": True}
STREAM = {"accept": "text/event-stream"}


async def asked(engine: SimEngine) -> LiveState:
    reply = await engine.client.request("GET", "/admin/live")
    return msgspec.json.decode(reply.body, type=LiveState)


def seven(engine: SimEngine) -> asyncio.Future[Any]:
    """Send seven requests."""
    ask = engine.client.request
    return asyncio.gather(*(ask("POST", "/v1/completions", json=BODY) for _ in range(7)))


@pytest.mark.sim
async def test_state_has_waiting_requests_with_reasons_steps_policies_and_memory() -> None:
    async with SimEngine() as engine:
        asking = seven(engine)
        await asyncio.sleep(0.05)
        during = await asked(engine)
        await asking
        after = await asked(engine)
    phases = [row.phase for row in during.requests]
    assert (phases.count("decode"), phases.count("ready")) == (4, 3)
    last = during.requests[-1]
    assert "all 4 slots are taken; requests ahead of it: 2" in last.why
    assert 0 < last.since_ns < during.now_ns
    assert during.requests_total == 7
    assert during.tenants == {"": {"running": 4, "waiting": 3}}
    assert during.kv["generate"].totals[0] == during.counters["generate"]["blocks_held"] > 0
    assert (after.requests, after.requests_total) == ([], 0)
    assert len(after.ended) == 7
    assert all(0 < one.ended_ns <= after.now_ns for one in after.ended)
    steps = during.steps["generate"]
    assert [end for end, *_ in steps] == sorted(end for end, *_ in steps)
    assert sum(took for _, took, _, _ in steps) > 0
    assert sum(prefill for *_, prefill in steps) == 4 * 3
    policies = {one.table: one for one in after.policies}
    admission = policies["generate.admission"]
    assert (admission.use, admission.fields) == ("fifo", {})
    assert admission.calls > 0
    assert {"fifo", "shortest-first"} <= set(admission.choices)
    assert policies["generate.memory"].choices == [], "it needs a restart"
    assert after.memory["pools"]
    assert after.memory["processes"]["engine_resident"] > 0


class NamesAll(RequestPolicy, frozen=True, kw_only=True):
    """Admits more requests than there is room for, the latest first, and fails to share a step."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(len(view.waiting))[::-1])

    def share(self, view: StepView) -> StepShares:
        raise LookupError("a bug")


@pytest.mark.sim
async def test_policy_that_fails_or_is_overruled_is_shown_on_the_page_and_in_metrics() -> None:
    async with SimEngine(allow_policy_failures=True) as engine:
        tables = ["generate.admission", "generate.step"]
        engine.engine.replace_policies(dict.fromkeys(tables, NamesAll()))
        await seven(engine)
        shown = {one.table: one for one in (await asked(engine)).policies}
        metrics = (await engine.client.request("GET", "/metrics")).body.decode()
    reason = "more entries than can join"
    assert shown["generate.admission"].overruled.keys() == {reason}
    assert (shown["generate.admission"].faults, shown["generate.step"].overruled) == (0, {})
    assert shown["generate.step"].faults > 0
    (sample,) = re.findall(r"^vsched_policy_overruled_total\{(.*)\} [1-9]", metrics, re.MULTILINE)
    assert f'reason="{reason}"' in sample
    assert 'seat="generate.admission"' in sample
    (passed,) = re.findall(r'(?m)^vsched_passed_over_seconds_max\{.*"generate".*\} (.+)', metrics)
    assert 0 < float(passed) < 10
    assert re.search(r'(?m)^vsched_policy_faults_total\{.*policy="NamesAll".*\} [1-9]', metrics)


class CountingEngine(FakeEngine):
    """Counts its states, and stops after the third."""

    states = 0

    def live(self) -> LiveState:
        self.states += 1
        if self.states == 3:
            self.state = "stopped"
        return super().live()


async def test_stream_sends_states_until_the_engine_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.api.operations.LIVE_EVERY_S", 0.001)
    reply = await ask("GET", "/admin/live", engine=CountingEngine(), headers=STREAM)
    assert [event["state"] for event in reply.events] == ["ready", "ready", "stopped"]
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_stream_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed page costs nothing."""
    monkeypatch.setattr("vsched.api.operations.LIVE_EVERY_S", 0.001)
    client = Client(create_app(FakeEngine(), ApiSettings()))
    sending = asyncio.create_task(client.send("GET", "/admin/live", headers=STREAM))
    await asyncio.sleep(0)
    client.leave()
    await sending


async def test_pages_share_a_state() -> None:
    engine = CountingEngine()
    app = create_app(engine, ApiSettings())
    replies = [await Client(app).send("GET", "/admin/live") for _ in range(5)]
    assert engine.states == 1
    assert len({reply.body for reply in replies}) == 1


async def test_page_is_complete_and_needs_no_other_host() -> None:
    """All files and their imports are served, and only the server itself may be called."""
    app = create_app(FakeEngine(), ApiSettings(api_key="secret"))
    replies = {path: await Client(app).send("GET", path) for path in PAGE_PATHS}
    assert {reply.status for reply in replies.values()} == {200}
    for path, reply in replies.items():
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        text = reply.body.decode()
        folder = path.rpartition("/")[0]
        for name in re.findall(r'from "\./([\w./-]+)"', text):
            assert f"{folder}/{name}" in PAGE_PATHS
        for name in re.findall(r'(?:src|href)="(page/[\w./-]+)"', text):
            assert f"/{name}" in PAGE_PATHS
        if "vendor" not in path:
            assert not re.search(r"https?://", text)
    assert {"/", "/page/app.js", "/page/vendor/uplot.css"} <= PAGE_PATHS


@each_case("library", ["htm", "preact", "uplot"])
def test_page_keeps_the_licences_of_its_libraries(library: str) -> None:
    text = (STATIC / "vendor" / f"{library}.LICENSE").read_text()
    assert "Apache License" in text or "MIT License" in text


def served() -> set[tuple[str, str]]:
    routes = create_app(FakeEngine(), ApiSettings()).routes
    documented = [r for r in routes if isinstance(r, ApiRoute) and r.path not in PAGE_PATHS]
    return {(r.method, r.path_format) for r in documented}


async def test_openapi_document_is_complete_and_resolves() -> None:
    reply = await ask("GET", "/openapi.json", api_key="secret")
    assert b"demo" not in reply.body, "no facts of this server: it needs no key"
    found = reply.json
    assert found["openapi"].startswith("3.")
    operations = [
        (method.upper(), path, operation)
        for path, each in found["paths"].items()
        for method, operation in each.items()
    ]
    assert {(method, path) for method, path, _ in operations} == served()
    assert all(operation["summary"] for *_, operation in operations)
    schemas = found["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.__struct_fields__)
    assert schemas["ChatRequest"]["required"] == ["messages"]
    names = set(re.findall(r'"#/components/schemas/(\w+)"', reply.body.decode()))
    assert "ChatChunk" in names
    assert names <= set(schemas)
