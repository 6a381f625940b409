"""The tenant of a request: from its key or header to the engine, and to metrics with few labels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, Client, FakeEngine, chat
from vsched.api import ApiSettings, create_app
from vsched.api.middleware import read_tenant_keys
from vsched.config import load_config
from vsched.errors import ConfigError

KEYS = {"red": "key of red", "blue": "key of blue"}


async def tenants_of(headers: list[dict[str, str]], **settings: Any) -> tuple[list[Any], str]:
    """Return the status or the tenant of each request, and the metrics afterwards."""
    engine = FakeEngine()
    client = Client(create_app(engine, ApiSettings(metrics_without_key=True, **settings)))
    found: list[Any] = []
    for one in headers:
        reply = await client.send(
            "POST", CHAT, chat(), headers={"content-type": "application/json", **one}
        )
        found.append(engine.calls[-1]["tenant"] if reply.status == 200 else reply.status)
    metrics = await client.send("GET", "/metrics")
    return found, metrics.body.decode()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_tenant_is_that_of_the_key() -> None:
    requested = [bearer("key of red"), {"x-api-key": "key of blue"}, bearer("another"), {}]
    found, metrics = await tenants_of(requested, tenant_keys=KEYS)
    assert found == ["red", "blue", 401, 401]
    assert (
        'vsched_tenant_requests_total{model_name="demo",outcome="stop",tenant="red"} 1.0' in metrics
    )
    assert 'vsched_tenant_tokens_total{kind="prompt",model_name="demo",tenant="blue"}' in metrics


async def test_common_key_has_no_tenant() -> None:
    requested = [bearer("common"), bearer("key of red")]
    found, metrics = await tenants_of(requested, tenant_keys=KEYS, api_key="common")
    assert found == ["", "red"]
    assert 'tenant=""' not in metrics


async def test_key_of_a_tenant_is_no_admin_key() -> None:
    app = create_app(FakeEngine(), ApiSettings(tenant_keys=KEYS, admin_key="admin"))
    reply = await Client(app).send("GET", "/admin/replicas", headers=bearer("key of red"))
    assert reply.status == 401


async def test_tenant_is_that_of_the_header_where_it_is_configured() -> None:
    requested = [{"x-team": "red"}, {}, {"x-team": "no name"}, {"x-team": "x" * 65}]
    found, _ = await tenants_of(requested, tenant_header="x-team")
    assert found == ["red", "", 400, 400]
    ignored, _ = await tenants_of(requested[:1])
    assert ignored == [""], "it was not requested"


async def test_client_with_a_key_cannot_claim_another_tenant() -> None:
    claimed = {**bearer("key of red"), "x-tenant": "blue"}
    found, _ = await tenants_of([claimed], tenant_keys=KEYS)
    assert found == ["red"]


async def test_metrics_have_a_bounded_number_of_tenants() -> None:
    requested = [{"x-team": f"t{number % 5}"} for number in range(10)]
    found, metrics = await tenants_of(requested, tenant_header="x-team", tenants_max=2)
    assert found == ["t0", "t1", "t2", "t3", "t4"] * 2, "policies see it in any case"
    for tenant, count in (("t0", 2), ("t1", 2), ("other tenants", 6)):
        labels = f'{{model_name="demo",outcome="stop",tenant="{tenant}"}}'
        assert f"vsched_tenant_requests_total{labels} {count}.0" in metrics
    assert 'tenant="t2"' not in metrics


@each_case("text", ["red=a\nblue=b=c\n", " red = a ,blue=b=c"])
def test_tenant_keys_are_read(text: str) -> None:
    assert read_tenant_keys(text, path="p") == {"red": "a", "blue": "b=c"}


@each_case(
    "text", ["red", "red=", "=a", "no name=a", "red=secret\nred=b", "red=secret,blue=secret"]
)
def test_tenant_keys_that_are_wrong_are_reported_without_the_keys(text: str) -> None:
    with pytest.raises(ConfigError, match=r"p: entry \d is not valid") as caught:
        read_tenant_keys(text, path="p")
    assert "secret" not in str(caught.value)


@each_case(
    ("changes", "words"),
    [
        ({"server.tenant_header": "x tenant"}, "limit letters, digits, hyphens"),
        (
            {"server.tenant_header": "x-tenant", "server.tenant_keys_variable": "KEYS"},
            "set one of the two",
        ),
    ],
)
def test_tenants_that_could_be_claimed_are_refused_at_start(
    changes: dict[str, str], words: str
) -> None:
    assignments = [f"{key}={value}" for key, value in changes.items()]
    with pytest.raises(ConfigError, match=words):
        load_config(None, sets=["model.path=demo", *assignments], environ={})
