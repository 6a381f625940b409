"""Host names, keys, origins, tenants, request ids and the access log."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import socket
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, Reply, ask, chat, served
from vsched.api import ApiSettings, create_app
from vsched.api import server as server_module
from vsched.api.middleware import read_tenant_keys
from vsched.api.openapi import JsonEndpoint
from vsched.config import Config, ServerConfig, load_config
from vsched.errors import ConfigError, RequestRefused
from vsched.logs import FIELDS

if TYPE_CHECKING:
    import httpx2
else:
    httpx2 = pytest.importorskip("httpx2")

PAGE = "https://app.example.com"
CLEAR, MODELS = "/admin/clear", "/v1/models"
KEY = "the right key"
KEYS = {"red": "key of red", "blue": "key of blue"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def alike(part: slice) -> str:
    """Return a wrong key; this part of its digest equals the part of the right key's digest."""
    keys = (f"wrong {number}" for number in itertools.count())
    return next(key for key in keys if digest(key)[part] == digest(KEY)[part])


OWN_NAMES = (
    "localhost", "localhost:8000", "LOCALHOST.", "a.localhost", "127.0.0.1:1", "[::1]:8000",
    "10.1.2.3", "[fe80::1]", "api.example.com:443", "x.example.net",
)  # fmt: skip
JSON_KINDS = ("application/json", "application/json; charset=utf-8", "Application/JSON;x=y")
OWN_PAGES = [
    ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
    ("http://localhost:8000", "localhost:8000", 200),
    ("http://127.0.0.1:3000", "127.0.0.1:8000", 403),
    ("https://127.0.0.1:8000", "127.0.0.1:8000", 403),
    ("http://evil.example", "evil.example", 403),
]
WRONG_KEYS = (
    *("", KEY[:1], KEY[:-1], KEY + "x", KEY[:-1] + "x", "x" + KEY[1:], KEY.upper()),
    *(alike(part) for part in (slice(0, 1), slice(0, 2), slice(-1, None))),
)
NO_KEYS = (None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer{KEY}")
BEHIND_A_KEY = (f"POST {CHAT}", "GET /metrics", "POST /admin/replicas/", "GET /v1/responses/x")
FOR_OPERATORS = [
    *(("GET", f"/admin/{name}", 200) for name in ("statistics", "replicas", "adapters", "live")),
    ("POST", "/v1/load_lora_adapter", 400),
    ("POST", "/v1/unload_lora_adapter", 400),
]
FOREIGN: list[dict[str, str]] = [
    *({"origin": origin} for origin in (PAGE, "null")),
    *({"x-forwarded-for": "127.0.0.1"}, {"x-forwarded-proto": "https"}),
    *({"forwarded": "for=127.0.0.1"}, {"via": "1.1 proxy"}, {"host": "evil.example"}),
]
ANY_NAME = {"allowed_hosts": ("*",)}
ANY_PAGE = {**ANY_NAME, "cors_origins": ("*",)}
NAMED = {"allowed_hosts": ("api.example.com", "*.example.net")}
FAR = {"x-forwarded-for": "192.0.2.1", "host": "a.b"}
OF_A_PROXY = {"api_key": KEY, "root_path": "/llm"}
OF_ALL = {"api_key": "user", "admin_key": "root", "tenant_keys": KEYS, **ANY_NAME}


@each_case(
    ("method", "path", "headers", "settings", "status"),
    [
        # JSON, however it is declared.
        *(("POST", CHAT, {"content-type": kind}, {}, 200) for kind in JSON_KINDS),
        *(
            ("POST", CHAT, {"content-encoding": one}, {}, 200)
            for one in ("identity", "Identity", "")
        ),
        # All addresses are accepted as names: no page can make a name of its own resolve to one.
        *(("GET", MODELS, {"host": host}, NAMED, 200) for host in OWN_NAMES),
        ("GET", MODELS, {"host": "a.b"}, ANY_NAME, 200),
        # The live page changes policies: its origin is the server itself, whose name cannot be rebound.
        *(
            ("POST", CLEAR, {"origin": origin, "host": host}, ANY_NAME, status)
            for origin, host, status in OWN_PAGES
        ),
        # Programs of this machine operate without a key; pages and proxied requests do not, whatever is allowed.
        ("POST", CLEAR, {}, {}, 200),
        *(
            ("POST", CLEAR, headers | kind, ANY_PAGE, 403)
            for headers in FOREIGN
            for kind in ({}, {"content-type": "text/plain"})
        ),
        # If a comparison left out any bytes of key or digest, one of these would pass.
        *(("GET", MODELS, bearer(wrong), {"api_key": KEY}, 401) for wrong in WRONG_KEYS),
        *(
            (method, path, {} if sent is None else {"authorization": sent}, {"api_key": KEY}, 401)
            for method, path in map(str.split, BEHIND_A_KEY)
            for sent in NO_KEYS
        ),
        ("GET", MODELS, {"authorization": f"bearer {KEY}"}, {"api_key": KEY}, 200),
        ("GET", "/metrics", {}, {"api_key": KEY, "metrics_without_key": True}, 200),
        *(("GET", probe, {}, {"api_key": KEY}, 200) for probe in ("/health", "/ready")),
        # From any address, operator paths need the operator key; changes of adapters, too.
        *(
            (method, path, bearer(key) | FAR, OF_ALL, wanted)
            for method, path, status in FOR_OPERATORS
            for key, wanted in (("root", status), ("user", 401), ("key of red", 401), ("", 401))
        ),
        ("GET", MODELS, bearer("root"), OF_ALL, 401),
        # Keys are checked by the path after a proxy's prefix; a path leads to the same with and without it.
        *(
            (method, before + path, headers, OF_A_PROXY, status)
            for before in ("", "/llm")
            for method, path, headers, status in (
                ("POST", CHAT, bearer(KEY), 200),
                ("POST", CHAT, bearer("other"), 401),
                ("GET", "/health", {}, 200),
                ("GET", "/admin/statistics", {}, 401),
            )
        ),
        *(
            ("GET", path, bearer(KEY), OF_A_PROXY, 404)
            for path in ("/llm", "/llm/llm/health", "/llmv1/models", "/x/health")
        ),
    ],
)
async def test_access_is_by_name_page_key_and_path(
    method: str, path: str, headers: dict[str, str], settings: dict[str, Any], status: int
) -> None:
    engine, body = FakeEngine(), chat() if path.endswith(CHAT) else b""
    reply = await ask(method, path, body, engine=engine, headers=headers, **settings)
    assert reply.status == status
    assert engine.cleared == (path == CLEAR and status == 200)
    if status == 401:
        assert reply.error["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    if status == 403:
        assert reply.error["code"] == "not_local"
        assert "server.admin_key_variable" in reply.error["message"]


FORM = "application/x-www-form-urlencoded"
KINDS = ("text/plain", "text/plain;application/json", FORM, "", None)
CODINGS = ("gzip", "deflate", "br", "zstd", "x-gzip", "gzip, identity", "identity + gzip")
"""The last one in two headers."""


@each_case("path", [CHAT, PLAIN, "/v1/messages", "/tokenize", "/admin/replicas"])
@each_case(
    ("name", "value", "limit"),
    [
        # Browsers send a preflight before JSON to another origin; they send these without one.
        *(("Content-Type", kind, "application/json. Remedy: send the header") for kind in KINDS),
        *(("Content-Encoding", each, "identity. Remedy: send it uncompressed") for each in CODINGS),
    ],
)
async def test_access_body_of_a_foreign_page_or_a_compressed_one_is_refused(
    path: str, name: str, value: str | None, limit: str
) -> None:
    """With its size, and in chunks."""
    lines = [] if value is None else [(name.lower(), each) for each in value.split(" + ")]
    shown = (value or "(none)").replace(" + ", ", ")
    if name == "Content-Encoding":
        lines.append(("content-type", "application/json"))
    for pieces in (None, [b"{}"]):
        client = Client(create_app(FakeEngine(), ApiSettings()))
        body = b"" if pieces else b"{}"
        reply = await client.send("POST", path, body, headers=lines, pieces=pieces)
        error = reply.json["error"]
        assert reply.status == 415
        assert f"value {name} {shown}, limit {limit}" in error["message"]
        assert path == "/v1/messages" or error["code"] == "unsupported_media_type"


@each_case("path", [MODELS, "/health", "/admin/statistics"])
@each_case(
    "host", ["evil.example", "localhost.evil.example:8000", "evillocalhost", "example.net", "1.2.3"]
)
async def test_access_foreign_name_is_refused(host: str, path: str) -> None:
    """DNS rebinding: a page whose name resolves to this machine reads nothing."""
    reply = await ask("GET", path, headers={"host": host}, allowed_hosts=("*.example.net",))
    assert (reply.status, reply.error["code"]) == (421, "host_not_allowed")
    assert f"value {host.partition(':')[0]}, limit localhost, addresses" in reply.error["message"]
    assert "server.allowed_hosts" in reply.error["message"]


@each_case(
    ("address", "server", "wanted"),
    [
        ("127.0.0.1", {}, ("127.0.0.1",)),
        ("127.0.1.1", {"host": "box"}, ("box",)),
        ("::1", {"host": "::1", "allowed_hosts": ("a.b",)}, ("a.b", "::1")),
        ("0.0.0.0", {"host": "0.0.0.0"}, ("*",)),
        ("::", {"host": "::", "api_key_variable": "K"}, ("*",)),
        ("192.0.2.1", {"host": "192.0.2.1", "allowed_hosts": ("a.b",)}, ("a.b",)),
    ],
)
def test_access_names_follow_the_address(
    address: str, server: dict[str, Any], wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on a network has names that it cannot know; without a key and names it logs that it is open."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config = Config(server=ServerConfig(**server))
        assert server_module._allowed_hosts(config, address) == wanted
    assert ("server.allowed_hosts" in caplog.text) == (address == "0.0.0.0")


@each_case(
    ("settings", "message"),
    [
        # Names that no browser sends would never match, without any error.
        *(
            ([f'server.{name}=["{value}"]'], rf"{name} .*is not valid: value \['.*Remedy")
            for name, value in (
                *(("allowed_hosts", "http://a.b"), ("allowed_hosts", "a.b:80")),
                *(
                    ("cors_origins", each)
                    for each in ("a.b", "http://[", "http://a/", "http://*.b")
                ),
            )
        ),
        *(
            ([f"server.root_path={json.dumps(path)}"], r"root_path .*is not valid: .*Remedy")
            for path in ("llm", "/llm/", "/", "/a b", "https://a.b/llm")
        ),
        *(
            ([f'server.otlp_endpoint="{url}"'], "otlp_endpoint .*gRPC is not supported.*Remedy")
            for url in ("collector:4317", "grpc://collector:4317", "http://", "http://c:4318?a=b")
        ),
        # Tenants that could be claimed.
        (["server.tenant_header=x tenant"], "limit letters, digits, hyphens"),
        (["server.tenant_header=x-tenant", "server.tenant_keys_variable=KEYS"], "set one of the"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, sets=["model.path=demo", *settings], environ={})


def test_settings_of_names_paths_and_origins_are_read() -> None:
    good = ['server.allowed_hosts=["a.b","*.c","*"]', 'server.cors_origins=["http://a:1","*"]']
    server = load_config(None, sets=[*good, 'server.root_path="/a/b-1"'], environ={}).config.server
    assert (server.cors_origins, server.root_path) == (("http://a:1", "*"), "/a/b-1")


@each_case(
    ("client", "server", "status"),
    [
        (("127.0.0.1", 1), ("127.0.0.1", 80), 200),
        (("::ffff:127.0.0.1", 1), ("::ffff:127.0.0.1", 80), 200),
        (("::1", 1, 0, 0), ("::1", 80), 200),
        (("192.0.2.1", 1), ("192.0.2.1", 80), 200),
        (None, None, 200),
        (("192.0.2.2", 1), ("192.0.2.1", 80), 403),
        (("::ffff:192.0.2.2", 1), ("::ffff:192.0.2.1", 80), 403),
        (("testclient", 1), ("testclient", 80), 403),
    ],
)
async def test_access_machine_is_known_by_connection(client: Any, server: Any, status: int) -> None:
    """On the address it connects to, or a loopback one; a Unix socket is always local."""
    app = create_app(FakeEngine(), ApiSettings())

    async def moved(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": client, "server": server}, receive, send)

    assert (await Client(moved).send("POST", CLEAR)).status == status


def preflight(origin: str = PAGE) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


async def test_access_pages_are_not_let_in_unless_configured() -> None:
    reply = await ask("OPTIONS", CHAT, headers=preflight())
    assert reply.status == 405
    replies = [reply, await ask("POST", CHAT, chat(), headers={"origin": PAGE})]
    assert not any(name.startswith("access-control") for one in replies for name in one.headers)


async def test_access_configured_page_may_call() -> None:
    """The preflight needs no key; the request after it does, and the page can read a refusal."""
    settings: dict[str, Any] = {"api_key": "key", "cors_origins": (PAGE,)}
    reply = await ask("OPTIONS", CHAT, headers=preflight(), **settings)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    for key, status in (("key", 200), ("other", 401)):
        sent = {"origin": PAGE, **bearer(key)}
        reply = await ask("POST", CHAT, chat(), headers=sent, **settings)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "Origin" in reply.headers["vary"]


async def test_access_other_pages_stay_outside() -> None:
    other = "https://evil.example"
    for method, sent in (("OPTIONS", preflight(other)), ("POST", {"origin": other})):
        reply = await ask(method, CHAT, chat(), headers=sent, cors_origins=(PAGE,))
        assert reply.status == (400 if method == "OPTIONS" else 200)
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        ("127.0.0.1", ["127.0.0.1", "localhost"]),
        ("localhost", ["localhost"]),
        ("0.0.0.0", ["127.0.0.1", "localhost"]),
        ("::1", ["[::1]"]),
        ("::", ["[::1]", "127.0.0.1", "localhost"]),
    ],
)
@pytest.mark.slow
async def test_access_clients_of_this_machine_work(
    bind: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users and operators, over real sockets, by any name of this machine."""
    if ":" in bind and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    monkeypatch.setenv("THE_KEY", "key")
    engine = FakeEngine()
    async with served(engine, host=bind, api_key_variable="THE_KEY") as port:
        for host in hosts:
            url = f"http://{host}:{port}"
            async with httpx2.AsyncClient(timeout=PATIENCE_S, headers=bearer("key")) as client:
                assert (await client.get(f"{url}/ready")).status_code == 200
                assert (await client.post(f"{url}{CHAT}", json=chat())).status_code == 200
                assert (await client.post(f"{url}/admin/clear")).status_code == 200
    assert engine.cleared == len(hosts)


RED, TEAMS = bearer("key of red"), [{"x-team": f"t{number % 5}"} for number in range(10)]
OF_A_TENANT = '_requests_total{model_name="demo",outcome="stop",tenant="%s"} %d.0'


@each_case(
    ("requested", "settings", "found", "shown", "hidden"),
    [
        # Of the key; a common one has none, and a client with a key cannot claim another tenant.
        ([RED, {"x-api-key": "key of blue"}, bearer("another"), {}], {"tenant_keys": KEYS},
         ["red", "blue", 401, 401],
         [OF_A_TENANT % ("red", 1), '_tokens_total{kind="prompt",model_name="demo",tenant="blue"}'],
         ""),
        ([bearer("common"), {**RED, "x-tenant": "blue"}],
         {"tenant_keys": KEYS, "api_key": "common"}, ["", "red"], [], ""),
        # From the header, if one is configured.
        ([{"x-team": "red"}, {}, {"x-team": "no name"}, {"x-team": "x" * 65}],
         {"tenant_header": "x-team"}, ["red", "", 400, 400], [], ""),
        ([{"x-team": "red"}], {}, [""], [], "red"),
        # Policies see a tenant in any case; metrics have a bounded number.
        (TEAMS, {"tenant_header": "x-team", "tenants_max": 2}, ["t0", "t1", "t2", "t3", "t4"] * 2,
         [OF_A_TENANT % each for each in (("t0", 2), ("t1", 2), ("other tenants", 6))], "t2"),
    ],
)  # fmt: skip
async def test_tenant_is_that_of_the_key_or_the_header(
    requested: list[dict[str, str]],
    settings: dict[str, Any],
    found: list[Any],
    shown: list[str],
    hidden: str,
) -> None:
    """The status or the tenant of each request, and the metrics afterwards."""
    engine = FakeEngine()
    client = Client(create_app(engine, ApiSettings(metrics_without_key=True, **settings)))
    for headers, wanted in zip(requested, found, strict=True):
        reply = await client.send("POST", CHAT, chat(), headers=headers)
        assert (engine.calls[-1]["tenant"] if reply.status == 200 else reply.status) == wanted
    metrics = (await client.send("GET", "/metrics")).body.decode()
    assert all(f"vsched_tenant{each}" in metrics for each in shown)
    assert f'tenant="{hidden}"' not in metrics


@each_case("text", ["red=a\nblue=b=c\n", " red = a ,blue=b=c"])
def test_tenant_keys_are_read(text: str) -> None:
    assert read_tenant_keys(text, path="p") == {"red": "a", "blue": "b=c"}


@each_case("text", ["red", "red=", "=a", "a b=a", "red=secret\nred=b", "red=secret,blue=secret"])
def test_tenant_keys_that_are_wrong_are_reported_without_the_keys(text: str) -> None:
    with pytest.raises(ConfigError, match=r"p: entry \d is not valid") as caught:
        read_tenant_keys(text, path="p")
    assert "secret" not in str(caught.value)


BODIES: dict[str, Any] = {
    CHAT: chat(),
    f"{CHAT} stream": chat(stream=True),
    PLAIN: {"prompt": "x"},
    f"{PLAIN} stream": {"prompt": "x", "stream": True},
    f"{CHAT} unknown": chat(nonsense=1),
    f"{CHAT} text": b"no JSON",
    "/tokenize": {"prompt": "x"},
    "/admin/replicas": {"group": "x", "action": "dance"},
    "/nowhere": {},
}
FULL = RequestRefused("full", code="queue_full", status=429, retry_after_s=1)


async def ask_as(name: str, sent: str | None, **options: Any) -> Reply:
    """Reply to the request of this name, whose id is set."""
    headers = {} if sent is None else {"x-request-id": sent}
    return await ask("POST", name.partition(" ")[0], BODIES[name], headers=headers, **options)


@each_case("name", BODIES)
async def test_request_id_is_on_every_kind_of_response(name: str) -> None:
    """That of the client, or one that is made; also on refusals of keys and of the engine."""
    full = FakeEngine()
    full.refusal = FULL
    for options in ({}, {"api_key": "secret"}, {"engine": full}):
        reply = await ask_as(name, "trace-1.2:3/a+b=", **options)
        assert reply.headers["x-request-id"] == "trace-1.2:3/a+b="
    ids = {(await ask_as(name, None)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch(r"[\w-]{24,}", one) for one in ids)


@each_case("sent", ["", "a b", "x" * 129, "é", 'a"b', "a\tb"])
async def test_request_id_that_cannot_be_sent_back_is_replaced(sent: str) -> None:
    reply = await ask_as(CHAT, sent)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == reply.json["id"]
    assert reply.json["id"].startswith("chatcmpl-")


async def test_request_id_of_a_client_is_a_part_of_the_engines() -> None:
    """Two requests may send the same id; statistics and records still contain it."""
    engine = FakeEngine()
    replies = [await ask_as(CHAT, "mine", engine=engine) for _ in range(2)]
    ids = [generation.request_id for generation in engine.generations]
    assert ids == [reply.json["id"] for reply in replies]
    assert len(set(ids)) == 2
    assert all(one.startswith("chatcmpl-mine-") for one in ids)


async def test_request_id_is_on_uncaught_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JsonEndpoint, "__call__", AsyncMock(side_effect=ValueError("broken")))
    app = create_app(FakeEngine(), ApiSettings())

    async def survived(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ValueError, match="broken"):
            await app(scope, receive, send)

    sent = {"x-request-id": "mine"}
    reply = await Client(survived).send("GET", "/admin/statistics", headers=sent)
    assert (reply.status, reply.headers["x-request-id"]) == (500, "mine")


async def test_access_log_has_all_but_probes_if_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    sent = {"x-request-id": "mine"}
    with caplog.at_level(logging.INFO, "vsched.access"):
        for on in (True, False):
            await ask("POST", CHAT, chat(stream=True), headers=sent, access_log=on)
            await ask("GET", "/v1/none\nforged?key=secret", headers=sent, access_log=on)
            await ask("GET", "/health", headers=sent, access_log=on)
    lines = [one for one in caplog.records if one.name == "vsched.access"]
    wanted = [("POST", CHAT, 200), ("GET", "/v1/none%0Aforged", 404)]
    for line, (method, path, status) in zip(lines, wanted, strict=True):
        fields = getattr(line, FIELDS)
        assert fields.pop("duration_ms") >= 0
        assert fields.pop("client")
        assert fields == {"method": method, "path": path, "status": status, "request_id": "mine"}
        assert f"{method} {path} {status} " in line.getMessage()
