"""`/admin/policies`: the policy of each table, and new policies while requests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import Client, FakeEngine
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestRefused
from vsched.policy import Admission, AdmissionView, ImagePolicy, PositiveCount, RequestPolicy
from vsched.sim.cluster import SimEngine
from vsched_policies.encoding import ChunkAware
from vsched_policies.memory import Pinned
from vsched_policies.requests import TenantFair

PATH = "/admin/policies"


class OneAtATime(RequestPolicy, frozen=True, kw_only=True):
    """A policy of a user's, which can be imported."""

    most: PositiveCount = 1

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(0 if view.running >= self.most else 1))


async def test_policies_are_listed_and_replaced() -> None:
    engine = FakeEngine()
    client = Client(create_app(engine, ApiSettings()))
    assert (await client.send("GET", PATH)).json == {"generate.step": {"use": "in-order"}}
    reply = await client.send("POST", PATH, {"generate.step": {"use": "tenant-fair"}})
    assert (reply.status, reply.json) == (200, {"generate.step": {"use": "tenant-fair"}})


@each_case("body", [b"{", [], {"generate.step": "tenant-fair"}])
async def test_policies_refuses_invalid_requests(body: object) -> None:
    engine = FakeEngine()
    reply = await Client(create_app(engine, ApiSettings())).send("POST", PATH, body)
    assert reply.status == 400
    assert engine.tables == {"generate.step": {"use": "in-order"}}


@pytest.mark.sim
async def test_engine_replaces_policies_while_requests_run() -> None:
    async with SimEngine() as engine:
        client = engine.client
        before = engine.engine.policies()
        assert before["generate.step"] == {"use": "in-order"}
        reply = await client.request("POST", PATH, json={"generate.step": {"use": "tenant-fair"}})
        assert reply.json()["generate.step"] == {"use": "tenant-fair"}
        engine.engine.replace_policy("generate.step", TenantFair(quantum_tokens=64))
        engine.engine.replace_policy("generate.admission", OneAtATime(most=2))
        after = engine.engine.policies()
        assert after["generate.step"]["use"] == "vsched_policies.requests:TenantFair"
        assert after["generate.step"]["quantum_tokens"] == 64
        assert after["generate.admission"] == {"use": f"{__name__}:OneAtATime", "most": 2}
        assert after["routing"] == before["routing"]
        engine.engine.replace_policies({"policy": {"use": f"{__name__}:OneAtATime"}})
        assert engine.engine.policies()["encode.admission"]["use"] == f"{__name__}:OneAtATime"


INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "no policy is named"),
    (
        {"generate.stop": {"use": "in-order"}},
        "generate.stop: not a policy table: value 'generate.stop', limit",
    ),
    ({"generate.step": {}}, "generate.step.use: no policy is named"),
    ({"generate.step": {"use": "tenant-far"}}, "Did you mean tenant-fair?"),
    (
        {"generate.step": {"use": "tenant-fair", "quantum": 1}},
        "generate.step.quantum: unknown field",
    ),
    (
        {"generate.step": {"use": "tenant-fair", "quantum_tokens": 0}},
        "value 0, limit int, 1 or more. Remedy:",
    ),
    (
        {"generate.memory": {"use": "auto-profile"}},
        "generate.memory: cannot be replaced while requests run",
    ),
    ({"generate.memory": Pinned(tokens=400)}, "the policy of the start, which is not called"),
    (
        {"encode.admission": {"use": "token-budget", "max_tokens": 8}},
        "value 8 tokens of an image, limit",
    ),
    (
        {"policy": {"use": f"{__name__}:OneAtATime", "seats": ["routing"]}},
        "policy.seats: not tables for which",
    ),
    (
        {"policy": {"use": f"{__name__}:OneAtATime"}, "encode.admission": {"use": "fifo"}},
        "also named in this change for encode.admission",
    ),
    ({"generate.step": {"use": "nowhere:Mine"}}, "cannot import 'nowhere:Mine'"),
    ({"generate.step": ChunkAware()}, "not a subclass of vsched.policy.RequestPolicy"),
]


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


BROKEN = {
    "exits": "import sys\nsys.exit(3)\n",
    "fails": "1 / 0\n",
    "limits": """
from vsched.policy import RequestPolicy


class P(RequestPolicy):
    def admit(self, view):
        return None

    def encode_limits(self):
        raise SystemExit(4)
""",
    "none": """
from vsched.policy import RequestPolicy


class P(RequestPolicy):
    def admit(self, view):
        return None

    def encode_limits(self):
        return None
""",
    "few": """
from vsched.policy import EncodeLimits, RequestPolicy


class P(RequestPolicy):
    def admit(self, view):
        return None

    def encode_limits(self):
        return EncodeLimits(images=-1)
""",
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
