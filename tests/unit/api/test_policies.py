"""`/admin/policies`: the policy of each table, and new ones while requests run; policies that fail harm no server."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tests.contract.harmful import KINDS, ODD, RAISES, wrapped
from tests.workers.properties import thorough
from vsched.aio.live import LiveState
from vsched.config.policies import policy_table
from vsched.errors import RequestRefused
from vsched.plugins import load_policy_class
from vsched.policy import (
    POLICY_TABLES,
    Admission,
    AdmissionView,
    ImagePolicy,
    PositiveCount,
    RequestPolicy,
)
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.scenario import draw_arrivals
from vsched_policies.encoding import ChunkAware
from vsched_policies.memory import Pinned
from vsched_policies.requests import TenantFair

PATH = "/admin/policies"


class OneAtATime(RequestPolicy, frozen=True, kw_only=True):
    """A policy of a user's, which can be imported."""

    most: PositiveCount = 1

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(0 if view.running >= self.most else 1))


@pytest.mark.sim
async def test_policies_are_listed_and_replaced_while_requests_run() -> None:
    async with SimEngine() as simulated:
        engine, request = simulated.engine, simulated.client.request
        before = (await request("GET", PATH)).json()
        assert before["generate.step"] == {"use": "shortest-remaining"}
        fair = {"generate.step": {"use": "tenant-fair"}}
        reply = await request("POST", PATH, json=fair)
        assert (reply.status, reply.json()) == (200, engine.policies())
        assert reply.json() == before | fair
        live = msgspec.json.decode((await request("GET", "/admin/live")).body, type=LiveState)
        assert ("generate.step", "tenant-fair") in [(one.table, one.use) for one in live.policies]
        engine.replace_policy("generate.step", TenantFair(quantum_tokens=64))
        engine.replace_policy("generate.admission", OneAtATime(most=2))
        after = engine.policies()
        assert after["generate.step"]["use"] == "vsched_policies.requests:TenantFair"
        assert after["generate.step"]["quantum_tokens"] == 64
        assert after["generate.admission"] == {"use": MINE, "most": 2}
        assert after["routing"] == before["routing"]
        engine.replace_policies({"policy": {"use": MINE}})
        assert engine.policies()["encode.admission"]["use"] == MINE
        await request("POST", PATH, json={"policy": FAIR})
        await request("POST", PATH, json={"generate.admission": {"use": "fifo"}})
        shown = (await request("GET", PATH)).json()
        shared = {path: one for path, one in shown.items() if one["use"] == "tenant-fair"}
        assert shared == {each: {**FAIR, "seats": sorted(shared)} for each in shared}
        reply = await request("POST", PATH, json=shared)
        assert (len(shared), reply.status, reply.json()) == (4, 200, shown)


MINE = f"{__name__}:OneAtATime"
FAIR = {"use": "tenant-fair"}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "no policy is named"),
    ({"generate.stop": FAIR}, "generate.stop: not a policy table: value 'generate.stop', limit"),
    ({"generate.step": {}}, "generate.step.use: no policy is named"),
    ({"generate.step": {"use": "tenant-far"}}, "Did you mean tenant-fair?"),
    ({"generate.step": {**FAIR, "x": 1}}, "generate.step.x: unknown field"),
    ({"generate.step": {**FAIR, "quantum_tokens": 0}}, "value 0, limit int, 1 or more. Remedy:"),
    ({"generate.step": {"use": "nowhere:Mine"}}, "cannot import 'nowhere:Mine'"),
    ({"generate.step": ChunkAware()}, "not a subclass of vsched.policy.RequestPolicy"),
    ({"generate.memory": {"use": "auto-profile"}},
     "generate.memory: cannot be replaced while requests run"),
    ({"generate.memory": Pinned(tokens=400)}, "the policy of the start, which is not called"),
    ({"encode.admission": {"use": "token-budget", "max_tokens": 8}},
     "value 8 tokens of an image, limit"),
    ({"generate.preemption": {"use": "youngest", "mode": "swap"}}, "needs swap space"),
    ({"policy": {"use": MINE, "seats": ["routing"]}}, "policy.seats: not tables for which"),
    ({"policy": {"use": MINE}, "encode.admission": {"use": "fifo"}},
     "also named in this change for encode.admission"),
    ({"policy": {"use": MINE}, "arrival": {**FAIR, "seats": ["arrival"]}},
     "arrival.seats: another policy for several seats is in this change"),
]  # fmt: skip


@pytest.mark.sim
async def test_invalid_policies_change_nothing() -> None:
    class Local(ImagePolicy, frozen=True, kw_only=True):
        def select(self, view: Any) -> list[int]:
            return []

    local: dict[str, Any] = {"encode.encoding": Local()}
    async with SimEngine() as engine:
        before = engine.engine.policies()
        for tables, message in [*INVALID, (local, "cannot import")]:
            with pytest.raises(RequestRefused) as caught:
                engine.engine.replace_policies(
                    {"routing": {"use": "round-robin"}, **tables} if tables else {}
                )
            assert message in caught.value.message
            assert (caught.value.status, caught.value.code) == (400, "invalid_policy")
            assert engine.engine.policies() == before


class BuiltOnce(RequestPolicy, frozen=True, kw_only=True):
    """Registers a metric when it is built, which works once."""

    built: ClassVar[list[str]] = []
    name: str = ""

    def __post_init__(self) -> None:
        if self.name in self.built:
            raise ValueError(f"duplicated metric {self.name}")
        self.built.append(self.name)

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(min(len(view.waiting), view.entries_free)))


@pytest.mark.sim
async def test_a_policy_that_can_be_built_only_once_is_installed(workload: Any) -> None:
    """The scheduler does not build it again: it could not go on without it."""
    async with SimEngine() as engine:
        table = {"use": f"{__name__}:BuiltOnce", "name": "first"}
        reply = await engine.client.request("POST", PATH, json={"generate.admission": table})
        assert reply.status == 200
        assert engine.engine.state == "ready"
        assert engine.engine.policies()["generate.admission"] == table
        await engine.run(workload)
        await engine.heal()
        reply = await engine.client.request("POST", PATH, json={"generate.admission": table})
        assert reply.status == 400
        assert "duplicated metric first" in reply.json()["error"]["message"]


LIMITS = """
import threading

from vsched.policy import RequestPolicy

assert threading.current_thread() is not threading.main_thread()  # the engine runs on

class P(RequestPolicy):
    def admit(self, view):
        return None

    def encode_limits(self):
        {}
"""
BROKEN = {
    "exits": "import sys\nsys.exit(3)\n",
    "fails": "1 / 0\n",
    "limits": LIMITS.format("raise SystemExit(4)"),
    "none": LIMITS.format("return None"),
    "few": LIMITS.format("from vsched.policy import EncodeLimits; return EncodeLimits(images=-1)"),
}


@pytest.mark.sim
async def test_code_that_fails_when_it_is_loaded_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    async with SimEngine() as engine:
        before = engine.engine.policies()
        for name, code in BROKEN.items():
            (tmp_path / f"{name}_when_loaded.py").write_text(code)
            table = {"use": f"{name}_when_loaded:P"}
            reply = await engine.client.request("POST", PATH, json={"encode.admission": table})
            error = reply.json()["error"]
            assert (reply.status, error["code"]) == (400, "invalid_policy")
            assert error["message"].startswith("encode.admission")
            assert ("_when_loaded.py" in error["message"]) == (name not in ("none", "few"))
        assert engine.engine.policies() == before
        assert engine.engine.state == "ready"


BODY = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
DOES: list[Callable[[Any, Any], Any]] = []
"""Stack of functions that all policies of this file call, with the built-in policy and the view."""


def _harm(ask: Any, view: Any) -> Any:
    return DOES[-1](ask, view)


HARMFUL: dict[str, dict[str, Any]] = {}
"""A policy of this file for each table whose policy gets a view."""
for _table, _kind in POLICY_TABLES.items():
    if _kind in KINDS:
        _default = load_policy_class(_kind, policy_table(small_config(), _table)["use"])
        _made = type(wrapped(_default, _harm))
        globals()[_made.__name__] = _made
        HARMFUL[_table] = {"use": f"{__name__}:{_made.__name__}"}


async def serve(does: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Serve a few requests, some with images, and one more at the end; return the statistics."""
    DOES.append(does)
    try:
        async with SimEngine(allow_policy_failures=True) as engine:
            engine.engine.replace_policies(HARMFUL)
            await engine.run(draw_arrivals(random.Random(5), 12))
            await engine.heal()
            answer = await engine.client.request("POST", "/v1/completions", json=BODY)
            assert answer.status == 200, answer.body
            return engine.engine.statistics()
    finally:
        DOES.pop()


@pytest.mark.sim
@pytest.mark.parametrize("number", [0, *thorough(*range(6, len(ODD), 6))])
async def test_odd_answers_harm_no_server(number: int) -> None:
    """A sample: `tests.contract` tries every odd answer in the kernel."""
    await serve(lambda *_: ODD[number].make())


@pytest.mark.sim
@pytest.mark.parametrize("number", [0, 3, *thorough(*range(6, len(RAISES), 3))])
async def test_no_exception_ends_a_server(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and logged with file, line and, once for each policy, the traceback."""

    def does(ask: Any, view: Any) -> Any:
        RAISES[number]()
        return ask(view)

    with caplog.at_level(logging.WARNING):
        faults = (await serve(does))["policy_faults"]
    assert len(faults) >= 6
    for name in faults:
        assert f"policy {name} failed at harmful.py:" in caplog.text
        assert caplog.text.count(f"policy {name} failed for the first time:\n") == 1
