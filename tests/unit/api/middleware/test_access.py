"""Access control: host names, keys, origins, and content types of bodies."""

from __future__ import annotations

import json
import logging
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.unit.api.fakes import CHAT, Client, FakeEngine, Reply, chat, served
from vsched.api import ApiSettings, create_app
from vsched.api import server as server_module
from vsched.config import Config, ServerConfig, load_config
from vsched.errors import ConfigError
from vsched.sim.network.asgi_client import AsgiClient

if TYPE_CHECKING:
    import httpx2
    import openai
else:
    openai = pytest.importorskip("openai")
    httpx2 = pytest.importorskip("httpx2")

PAGE = "https://app.example.com"


async def ask(
    method: str,
    path: str,
    body: object = b"",
    *,
    engine: FakeEngine | None = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Reply:
    app = create_app(engine or FakeEngine(), ApiSettings(**settings))
    return await Client(app).send(method, path, body, headers=headers)


# --- bodies ---


@each_case("sent", ["application/json", "application/json; charset=utf-8", "Application/JSON;x=y"])
async def test_access_json_is_taken_however_it_is_written(sent: str) -> None:
    assert (await ask("POST", CHAT, chat(), headers={"content-type": sent})).status == 200


@each_case("path", [CHAT, "/v1/completions", "/tokenize", "/admin/replicas"])
@each_case(
    "sent",
    ["text/plain", "text/plain;application/json", "application/x-www-form-urlencoded", "", None],
)
async def test_access_body_that_a_foreign_page_could_send_is_refused(
    path: str, sent: str | None
) -> None:
    """Browsers send a preflight before JSON to another origin; they send these without one."""
    body = json.dumps(chat()).encode()
    lines = [] if sent is None else [("content-type", sent)]
    app = create_app(FakeEngine(), ApiSettings())
    response = await AsgiClient(app).request("POST", path, body=body, headers=lines)
    error = response.json()["error"]
    assert (response.status, error["code"]) == (415, "unsupported_media_type")
    assert f"Content-Type {sent or ''}" in error["message"] or sent is None
    assert "limit application/json. Remedy: send the header Content-Type" in error["message"]


async def test_access_chunked_body_needs_its_type_too() -> None:
    app = create_app(FakeEngine(), ApiSettings())
    reply = await Client(app).send(
        "POST", "/admin/clear", pieces=[b"{}"], headers={"content-type": "text/plain"}
    )
    assert reply.status == 415


@each_case("coding", ["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, identity"])
@each_case("path", [CHAT, "/v1/messages", "/admin/replicas"])
async def test_access_compressed_body_is_refused_by_its_coding(coding: str, path: str) -> None:
    reply = await ask("POST", path, chat(), headers={"content-encoding": coding})
    assert reply.status == 415
    message = reply.json["error"]["message"]
    assert (
        f"value Content-Encoding {coding}, limit identity. Remedy: send it uncompressed" in message
    )


async def test_access_compressed_body_is_refused_by_a_second_header_as_well() -> None:
    lines = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    app = create_app(FakeEngine(), ApiSettings())
    response = await AsgiClient(app).request(
        "POST", CHAT, body=b"x", headers=[("content-type", "application/json"), *lines]
    )
    assert response.status == 415


@each_case("coding", ["identity", "Identity", ""])
async def test_access_body_that_is_said_to_be_as_it_is_is_taken(coding: str) -> None:
    reply = await ask("POST", CHAT, chat(), headers={"content-encoding": coding})
    assert reply.status == 200


# --- names ---


@each_case(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.1:1",
        "[::1]:8000",
        "10.1.2.3",
        "[fe80::1]",
        "api.example.com:443",
        "x.example.net",
    ],
)
async def test_access_own_names_are_taken(host: str) -> None:
    """All addresses are accepted: no page can make a name of its own resolve to one."""
    hosts = ("api.example.com", "*.example.net")
    reply = await ask("GET", "/v1/models", headers={"host": host}, allowed_hosts=hosts)
    assert reply.status == 200


@each_case("path", ["/v1/models", "/health", "/admin/statistics"])
@each_case(
    "host", ["evil.example", "localhost.evil.example:8000", "evillocalhost", "example.net", "1.2.3"]
)
async def test_access_foreign_name_is_refused(host: str, path: str) -> None:
    """DNS rebinding: a page whose name resolves to this machine reads nothing."""
    reply = await ask("GET", path, headers={"host": host}, allowed_hosts=("*.example.net",))
    assert (reply.status, reply.error["code"]) == (421, "host_not_allowed")
    assert f"value {host.partition(':')[0]}, limit localhost, addresses" in reply.error["message"]
    assert "server.allowed_hosts" in reply.error["message"]


@each_case("allowed", [None, ("*",)])
async def test_access_any_name_is_taken_if_none_is_known(
    allowed: tuple[str, ...] | None,
) -> None:
    reply = await ask("GET", "/v1/models", headers={"host": "a.b"}, allowed_hosts=allowed)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("address", "server", "wanted"),
    [
        ("127.0.0.1", {}, ("127.0.0.1",)),
        ("127.0.1.1", {"host": "box"}, ("box",)),
        ("::1", {"host": "::1", "allowed_hosts": ("a.b",)}, ("a.b", "::1")),
        ("0.0.0.0", {"host": "0.0.0.0"}, None),
        ("::", {"host": "::", "api_key_variable": "K"}, None),
        ("192.0.2.1", {"host": "192.0.2.1", "allowed_hosts": ("a.b",)}, ("a.b",)),
    ],
)
def test_access_names_follow_the_address(
    address: str,
    server: dict[str, Any],
    wanted: tuple[str, ...] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server on a network has names that it cannot know; without a key and names it logs that it is open."""
    config = Config(server=ServerConfig(**server))
    with caplog.at_level(logging.WARNING):
        assert server_module._allowed_hosts(config, address) == wanted
    assert ("server.allowed_hosts" in caplog.text) == (address == "0.0.0.0")


@each_case(
    "setting",
    [
        'allowed_hosts=["http://a.b"]',
        'allowed_hosts=["a.b:80"]',
        'cors_origins=["a.b"]',
        'cors_origins=["https://a.b/"]',
        'cors_origins=["https://*.b"]',
    ],
)
def test_access_name_that_no_browser_sends_is_refused(setting: str) -> None:
    """It would never match, without any error."""
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"server.{key} .*is not valid: value \['.*Remedy"):
        load_config(None, sets=[f"server.{setting}"], environ={})
    good = ['server.allowed_hosts=["a.b","*.c","*"]', 'server.cors_origins=["http://a:1","*"]']
    assert load_config(None, sets=good, environ={}).config.server.cors_origins == (
        "http://a:1",
        "*",
    )


# --- operators ---


@each_case(
    "headers",
    [
        {"origin": PAGE},
        {"origin": "null"},
        {"host": "evil.example"},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"via": "1.1 proxy"},
    ],
)
@each_case("allowed", [None, ("*",)])
async def test_access_only_programs_of_this_machine_operate_without_a_key(
    headers: dict[str, str], allowed: tuple[str, ...] | None
) -> None:
    """Neither pages nor proxied requests, whatever names and origins are allowed elsewhere."""
    engine = FakeEngine()
    for sent in ({"content-type": "text/plain"}, {}):
        reply = await ask(
            "POST",
            "/admin/clear",
            engine=engine,
            headers=headers | sent,
            allowed_hosts=allowed,
            cors_origins=("*",),
        )
        assert (reply.status, reply.error["code"]) == (403, "not_local")
    assert "server.admin_key_variable" in reply.error["message"]
    assert engine.cleared == 0
    assert (await ask("POST", "/admin/clear", engine=engine)).status == 200
    assert engine.cleared == 1


@each_case(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
        ("http://127.0.0.1:3000", "127.0.0.1:8000", 403),
        ("https://127.0.0.1:8000", "127.0.0.1:8000", 403),
        ("http://evil.example", "evil.example", 403),
    ],
)
async def test_access_the_own_page_operates_and_no_other(
    origin: str, host: str, status: int
) -> None:
    """The live page changes policies: its origin is the server itself, under a name that cannot be rebound."""
    headers = {"origin": origin, "host": host}
    reply = await ask("POST", "/admin/clear", headers=headers, allowed_hosts=None)
    assert reply.status == status


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
async def test_access_this_machine_is_known_by_its_connection(
    client: Any, server: Any, status: int
) -> None:
    """On the address it connects to, or a loopback one; a Unix socket is always local."""
    app = create_app(FakeEngine(), ApiSettings())

    async def moved(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": client, "server": server}, receive, send)

    assert (await Client(moved).send("POST", "/admin/clear")).status == status


@each_case("path", ["/admin/statistics", "/admin/replicas", "/admin/adapters"])
async def test_access_admin_key_opens_what_the_api_key_does_not(path: str) -> None:
    """From anywhere."""
    settings: dict[str, Any] = {"api_key": "user", "admin_key": "root", "allowed_hosts": None}
    for key, status in (("root", 200), ("user", 401), ("", 401)):
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": "192.0.2.1", "host": "a.b"}
        reply = await ask("GET", path, headers=headers, **settings)
        assert reply.status == status
    headers = {"authorization": "Bearer root"}
    assert (await ask("GET", "/v1/models", headers=headers, **settings)).status == 401


@each_case("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_access_to_adapters_is_for_operators_by_any_path(path: str) -> None:
    settings: dict[str, Any] = {"api_key": "user", "admin_key": "root"}
    for key, status in (("root", 400), ("user", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await ask("POST", path, headers=headers, **settings)).status == status


async def test_access_metrics_are_open_by_a_setting_only() -> None:
    assert (await ask("GET", "/metrics", api_key="k")).status == 401
    assert (await ask("GET", "/metrics", api_key="k", metrics_without_key=True)).status == 200


@each_case(("key", "status"), [("key", 200), ("other", 401)])
async def test_access_with_what_a_proxy_leaves_before_paths(key: str, status: int) -> None:
    """Keys are checked by the path after the prefix; with and without it, a path leads to the same."""
    settings: dict[str, Any] = {"api_key": "key", "root_path": "/llm"}
    headers = {"authorization": f"Bearer {key}"}
    for before in ("", "/llm"):
        reply = await ask("POST", f"{before}{CHAT}", chat(), headers=headers, **settings)
        assert reply.status == status
        assert (await ask("GET", f"{before}/health", **settings)).status == 200
        assert (await ask("GET", f"{before}/admin/statistics", **settings)).status == 401
    for path in ("/llm", "/llm/llm/health", "/llmv1/models", "/x/health"):
        assert (await ask("GET", path, headers=headers, **settings)).status != 200


@each_case("path", ["llm", "/llm/", "/", "/a b", "https://a.b/llm"])
def test_access_root_path_is_the_beginning_of_a_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"server.root_path .*is not valid: .*Remedy"):
        load_config(None, sets=[f"server.root_path={json.dumps(path)}"], environ={})
    sets = ['server.root_path="/a/b-1"']
    assert load_config(None, sets=sets, environ={}).config.server.root_path == "/a/b-1"


# --- pages ---


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
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    for key, status in (("key", 200), ("other", 401)):
        sent = {"origin": PAGE, "authorization": f"Bearer {key}"}
        reply = await ask("POST", CHAT, chat(), headers=sent, **settings)
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "Origin" in reply.headers["vary"]


async def test_access_other_pages_stay_outside() -> None:
    other = "https://evil.example"
    reply = await ask("OPTIONS", CHAT, headers=preflight(other), cors_origins=(PAGE,))
    assert reply.status == 400
    assert "access-control-allow-origin" not in reply.headers
    reply = await ask("GET", "/v1/models", headers={"origin": other}, cors_origins=(PAGE,))
    assert "access-control-allow-origin" not in reply.headers


# --- real clients ---


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
    """The openai client with its key, and curl's requests, over real sockets."""
    if ":" in bind and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    monkeypatch.setenv("THE_KEY", "key")
    engine = FakeEngine()
    async with served(engine, host=bind, api_key_variable="THE_KEY") as port:
        for host in hosts:
            url = f"http://{host}:{port}"
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=PATIENCE_S
            ) as client:
                messages: Any = [{"role": "user", "content": "hi"}]
                answer = await client.chat.completions.create(model="demo", messages=messages)
                assert answer.choices[0].message.content == "Hello"
                stream = await client.completions.create(model="demo", prompt="x", stream=True)
                assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
            async with httpx2.AsyncClient(timeout=PATIENCE_S) as plain:
                assert (await plain.get(f"{url}/ready")).status_code == 200
                headers = {"authorization": "Bearer key"}
                cleared = await plain.post(f"{url}/admin/clear", headers=headers)
                assert cleared.status_code == 200
                body = msgspec.json.encode({"prompt": "abc"})
                typed = {**headers, "content-type": "application/json;charset=UTF-8"}
                tokens = await plain.post(f"{url}/tokenize", content=body, headers=typed)
                assert tokens.json()["count"] == 3
    assert engine.cleared == len(hosts)


@each_case("url", ["collector:4317", "grpc://collector:4317", "http://", "http://c:4318?a=b"])
def test_otlp_endpoint_is_a_url_of_http(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server.otlp_endpoint .*gRPC is not supported.*Remedy"):
        load_config(None, sets=[f"server.otlp_endpoint={json.dumps(url)}"], environ={})
