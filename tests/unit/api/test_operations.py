from __future__ import annotations

import asyncio
import datetime as dt
from importlib.metadata import version
from typing import Any, cast

import pytest
from starlette.routing import Route

from tests.each_case import each_case
from tests.unit.api.fakes import IMAGE_TOKENS, Client, FakeEngine, ask, refusal
from tests.unit.media.fakes import FakePreprocessor
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings, create_app
from vsched.api.app import create_frontend
from vsched.api.metrics import ApiMetrics
from vsched.api.middleware import CheckAccess
from vsched.errors import RequestFailed, RequestRefused

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@each_case(
    ("state", "status"),
    [("loading", 503), ("ready", 200), ("degraded", 200), ("draining", 503), ("stopped", 503)],
)
async def test_state_is_reported_and_gates_requests(state: str, status: int) -> None:
    """A model that has not loaded yet has no known limit."""
    engine = FakeEngine()
    engine.state = state
    if state == "loading":
        del engine.preprocessor.info
    for path in ("/health", "/ready"):
        reply = await ask("GET", path, engine=engine)
        assert (reply.status, reply.json) == (status, {"status": state})
    for path, body in (("chat/completions", CHAT), ("models", b""), ("models/demo", b"")):
        reply = await ask("POST" if body else "GET", f"/v1/{path}", body, engine=engine)
        assert (reply.status, "retry-after" in reply.headers) == (status, status == 503)
    assert (await ask("POST", "/tokenize", {"prompt": "x"}, engine=engine)).status == status


async def test_models() -> None:
    listed = (await ask("GET", "/v1/models")).json
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert listed["data"][0]["max_model_len"] == 1000
    assert (await ask("GET", "/v1/models/demo")).json["object"] == "model"
    assert (await ask("GET", "/v1/models/org/other")).status == 404


async def test_models_in_the_format_of_anthropic() -> None:
    engine = FakeEngine()
    engine.adapter_rows.append({"name": "org/sql", "state": "ready"})
    # One application: it says since when it serves.
    client = Client(create_app(engine, ApiSettings()))
    listed = (await client.send("GET", "/v1/models?limit=20", headers=ANTHROPIC)).json
    first = listed.pop("data")[0]
    assert listed == {"first_id": "demo", "last_id": "org/sql", "has_more": False}
    assert (first["type"], first["display_name"]) == ("model", "demo")
    assert first["max_input_tokens"] == 1000
    assert dt.datetime.fromisoformat(first["created_at"]).tzinfo is not None
    assert (await client.send("GET", "/v1/models/demo", headers=ANTHROPIC)).json == first
    refused = await client.send("GET", "/v1/models/other", headers=ANTHROPIC)
    assert refused.headers["request-id"] == refused.headers["x-request-id"]
    assert (refused.status, refused.json["error"]["type"]) == (404, "not_found_error")


async def test_adapters_are_models_with_a_parent() -> None:
    engine = FakeEngine()
    loaded = await ask("POST", "/admin/adapters", {"name": "org/sql", "path": "sql"}, engine=engine)
    assert (loaded.json["state"], loaded.json["path"]) == ("ready", "sql")
    engine.adapter_rows.append({"name": "late", "state": "loading"})
    listed = (await ask("GET", "/v1/models", engine=engine)).json["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("demo", None), ("org/sql", "demo")]
    assert {one["root"] for one in listed} == {"demo"}
    assert (await ask("GET", "/v1/models/org/sql", engine=engine)).json["parent"] == "demo"
    assert (await ask("GET", "/v1/models/late", engine=engine)).status == 404
    rows = (await ask("GET", "/admin/adapters", engine=engine)).json["adapters"]
    assert [(row["name"], row["requests"]) for row in rows] == [("org/sql", 2), ("late", 0)]
    answer = await ask("POST", "/v1/chat/completions", {**CHAT, "model": "org/sql"}, engine=engine)
    assert (answer.json["model"], engine.calls[-1]["adapter"]) == ("org/sql", "org/sql")
    answer = await ask("POST", "/v1/chat/completions", {**CHAT, "model": "demo"}, engine=engine)
    assert (answer.json["model"], engine.calls[-1]["adapter"]) == ("demo", "")
    refused = await ask("POST", "/v1/chat/completions", {**CHAT, "model": "late"}, engine=engine)
    assert refused.json["error"]["message"].endswith("Remedy: ask for demo or org/sql.")
    metrics = (await ask("GET", "/metrics", engine=engine)).body.decode()
    assert 'vsched_adapter_requests_total{adapter="org/sql",model_name="demo"} 2.0' in metrics
    gone = await ask("DELETE", "/admin/adapters/org/sql", engine=engine)
    assert gone.json["state"] == "unloaded"
    assert (await ask("DELETE", "/admin/adapters/org/sql", engine=engine)).status == 404


async def test_adapters_are_loaded_as_with_vllm() -> None:
    engine, body = FakeEngine(), {"lora_name": "sql", "lora_path": "sql", "load_inplace": False}
    loaded = await ask("POST", "/v1/load_lora_adapter", body, engine=engine)
    assert loaded.body == b"Success: LoRA adapter 'sql' added successfully."
    engine.refusal = RequestRefused("taken. Remedy: another.", code="name_taken", status=409)
    assert (await ask("POST", "/v1/load_lora_adapter", body, engine=engine)).status == 400
    gone = await ask("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}, engine=engine)
    assert gone.body == b"Success: LoRA adapter 'sql' removed successfully."
    assert (await ask("POST", "/v1/unload_lora_adapter", body, engine=engine)).status == 404


def tokenized(*tokens: int, texts: list[str] | None = None) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": 1000, "tokens": [*tokens], "token_strs": texts}


@each_case(
    ("path", "body", "found"),
    [
        # Special tokens: for prompts by default, for messages not, whose template writes its own.
        ("/tokenize", {"prompt": "a"}, tokenized(1, 97)),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}, tokenized(1, 97)),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, tokenized(97)),
        ("/tokenize", CHAT, tokenized(*b"user:hi")),
        ("/tokenize", {**CHAT, "add_special_tokens": False}, tokenized(*b"user:hi")),
        ("/tokenize", {**CHAT, "add_special_tokens": True}, tokenized(1, *b"user:hi")),
        ("/tokenize", {**CHAT, "add_generation_prompt": False},
         tokenized(*b"add_generation_prompt=False;user:hi")),
        ("/tokenize", {"prompt": "a\xe9", "return_token_strs": True},
         tokenized(1, 97, 0xE9, texts=["\x01", "a", "bytes:\\xe9"])),
        ("/detokenize", {"tokens": [72, 105], "model": "demo"}, {"prompt": "Hi"}),
        ("/detokenize", {"tokens": []}, {"prompt": ""}),
    ],
)  # fmt: skip
async def test_tokenize_and_detokenize(
    path: str, body: object, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    plain = FakePreprocessor().tokenize

    def tokenize(text: str, *, images: bool = True) -> list[int]:
        return plain(text) if "user" in text else [1, *plain(text)]

    monkeypatch.setattr(engine.preprocessor, "tokenize", tokenize)
    assert (await ask("POST", path, body, engine=engine)).json == found


async def test_tokenize_shows_tools_to_the_template_and_counts_images() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    image = [{"type": "image_url", "image_url": "data:x"}]
    seen = {"messages": [{"role": "user", "content": image}]}
    for body, least in (({**CHAT, "tools": tools}, len("user:hi")), (seen, IMAGE_TOKENS)):
        assert (await ask("POST", "/tokenize", body)).json["count"] > least


async def test_detokenize_takes_the_blank_away_that_the_tokenizer_adds() -> None:
    """For tokenizers that begin every text with a space; special tokens stay."""
    engine = FakeEngine()
    texts = {1: b"<s>", 2: b" Hi"}
    engine.preprocessor.token_bytes = texts.__getitem__  # type: ignore[assignment]
    engine.preprocessor.detokenize = lambda _: "Hi"  # type: ignore[assignment]
    reply = await ask("POST", "/detokenize", {"tokens": [2]}, engine=engine)
    assert reply.json == {"prompt": "Hi"}
    reply = await ask("POST", "/detokenize", {"tokens": [1, 2]}, engine=engine)
    assert reply.json == {"prompt": "<s> Hi"}


@each_case(
    ("path", "body", "words"),
    [
        ("/detokenize", {}, "`tokens` is missing"),
        ("/detokenize", {"tokens": [256]}, "value 256, limit below 256"),
        ("/detokenize", {"tokens": [-1]}, "limit >= 0"),
        ("/detokenize", {"tokens": [1] * 1001}, "value 1001 tokens, limit 1000 tokens of context"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "ask for demo"),
        ("/detokenize", {"tokens": "ab"}, "limit a list"),
        ("/tokenize", {}, "one of `prompt` and `messages` is needed"),
        ("/tokenize", {"prompt": "x", **CHAT}, "one of `prompt` and `messages` is needed"),
        ("/tokenize", {"prompt": 5}, "limit a text"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "ask for demo"),
        ("/tokenize", {"messages": []}, "limit 1 to 1024 messages"),
        ("/tokenize", {"prompt": "x", "nonsense": 1}, "`nonsense` is not a known parameter"),
        ("/tokenize", {**CHAT, "tools": [{"type": "function"}]}, "value no function"),
        ("/tokenize", {**CHAT, "chat_template": "x"}, "`chat_template` is not supported"),
        ("/tokenize", {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
         "exclude each other"),
    ],
)  # fmt: skip
async def test_tokenize_and_detokenize_refuse(path: str, body: dict[str, Any], words: str) -> None:
    error = await refusal(path, body, 404 if "model" in body else 400)
    assert words in error["message"]


async def test_version_load_and_ping() -> None:
    """Paths that gateways and load balancers of vLLM servers request."""
    assert (await ask("GET", "/version")).json == {"version": version("vsched")}
    for method in ("GET", "POST"):
        assert (await ask(method, "/ping", api_key="secret")).status == 200
    engine = FakeEngine(asyncio.Event())
    app = create_app(engine, ApiSettings())
    task = asyncio.ensure_future(Client(app).send("POST", "/v1/chat/completions", CHAT))
    await engine.entered.wait()
    assert (await Client(app).send("GET", "/load")).json == {"server_load": 1}
    task.cancel()
    await asyncio.wait([task])
    assert (await Client(app).send("GET", "/load")).json == {"server_load": 0}


async def test_statistics_and_clear() -> None:
    """Clearing takes one call, which reports the remaining requests."""
    engine = FakeEngine()
    engine.numbers["since"] = dt.date(2024, 1, 2)
    found = (await ask("GET", "/admin/statistics", engine=engine)).json
    numbers = {"queue": {"waiting": 3}, "kv": {"blocks-free": 2.5}, "since": "2024-01-02"}
    assert found == {"state": "ready", **numbers}
    cleared = await ask("POST", "/admin/clear", engine=engine)
    assert cleared.json == {"running": 0, "waiting": 0}
    assert (await ask("GET", "/admin/clear", engine=engine)).status == 405


async def test_metrics_count_outcomes() -> None:
    engine = FakeEngine(OutputDelta("a", [1]), OutputDelta("b", [2], None, "length"))
    client = Client(create_app(engine, ApiSettings()))
    await client.send("POST", "/v1/chat/completions", CHAT)
    await client.send("POST", "/v1/chat/completions", b"{")
    engine.script = (RequestFailed("x"),)
    await client.send("POST", "/v1/completions", {"prompt": "x"})
    engine.refusal = RequestRefused("x", code="x")
    await client.send("POST", "/v1/completions", {"prompt": "x"})
    reply = await client.send("GET", "/metrics")
    lines = reply.body.decode().splitlines()
    for endpoint, outcome in (
        *(("chat", "length"), ("chat", "refused")),
        *(("completions", "failed"), ("completions", "refused")),
    ):
        labels = f'endpoint="{endpoint}",model_name="demo",outcome="{outcome}"'
        assert f"vsched_requests_total{{{labels}}} 1.0" in lines
    for name, value in (
        ("generation_tokens_total", 2),
        ("prompt_tokens_total", 14),
        ("prompt_tokens_cached_total", 4),
        ("time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 4),
    ):
        assert f'vsched_{name}{{model_name="demo"}} {value}.0' in lines
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


TAKEN = [
    *(("/v1/chat/completions", "POST"), ("/v1/chat/completions/", "POST")),
    *(("/v1/models", "GET, HEAD"), ("/v1/models/demo/x", "GET, HEAD")),
    *(("/ping", "GET, HEAD, POST"), ("/v1/load_lora_adapter", "POST")),
    *(("/admin/replicas", "GET, HEAD, POST"), ("/admin/adapters", "GET, HEAD, POST")),
    ("/admin/adapters/a/b", "DELETE"),
]
"""Paths, and all methods that they take."""
INSTEAD = [
    ("/v1/embeddings", "server of such a model"),
    ("/v1/batches/batch_1/cancel", "send requests"),
    ("/v1/files", "as URLs or data URLs"),
    ("/v1/uploads/", "as URLs or data URLs"),
    ("/v1/audio/transcriptions", "server of such a model"),
    ("/v1/vector_stores/vs_1/search", "leave it to the client"),
    ("/v1/threads/thread_1/runs", "send the whole history"),
    ("/v1/complete", "send it to /v1/completions"),
    ("/v1/responses/resp_1/cancel", "close the connection"),
    ("/v1/responses/resp_1/input_items", "send the whole history"),
    ("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
    ("/v1/chat/completions/chatcmpl-1/messages", "send the whole history"),
]
"""Unserved paths of other servers, with their remedies."""


@each_case(
    ("method", "path", "allow", "words"),
    [
        *(("GET", path, "", "") for path in ("/HEALTH", "*", "/v1/nowhere/")),
        # Double slashes, from a base URL with a trailing slash, bypass no path rule of a proxy.
        *(
            ("POST", path, "", f"leave out the double slash: {path.replace('//', '/')}.")
            for path in ("//v1/models", "/v1//chat/completions", "//admin//clear")
        ),
        *(
            ("DELETE", path, "", "answers are not stored")
            for path in ("/v1/responses/resp_1", "/v1/chat/completions/chatcmpl-1")
        ),
        *((verb, path, "", words) for path, words in INSTEAD for verb in ("GET", "POST", "DELETE")),
        *(
            (method, path, methods, f"value {method}, limit {methods}. Remedy")
            for path, methods in TAKEN
            for method in ("PUT", "OPTIONS", "PROPFIND")
        ),
    ],
)
async def test_paths_and_methods_that_are_not_served_are_refused_with_a_remedy(
    method: str, path: str, allow: str, words: str
) -> None:
    """In any process, before the key, and before the body: files are sent as forms."""
    engine, settings = FakeEngine(), ApiSettings(api_key="k")
    app = create_app(engine, settings)
    front = create_frontend(engine, settings, ApiMetrics(engine), operations=app)
    form = {"content-type": "multipart/form-data; boundary=x"}
    for each in (app, front):
        reply = await Client(each).send(method, path, b"--x", headers=form)
        message = reply.error["message"]
        before, _, remedy = message.partition(" Remedy: ")
        wanted = (405, "method_not_allowed") if allow else (404, "not_found")
        assert (reply.status, reply.error["code"]) == wanted
        if allow:
            assert (reply.headers["allow"], reply.headers["connection"]) == (allow, "close")
        assert words in (remedy if path in dict(INSTEAD) else message)
        assert path not in dict(INSTEAD) or f"`{path.rstrip('/')}` is not served (" in before


@each_case(
    ("method", "path", "headers", "status", "kind"),
    [
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/messages/batches/b/results", ANTHROPIC, 404, "not_found_error"),
        ("GET", "/v1/files", ANTHROPIC, 404, "not_found_error"),
    ],
)
async def test_clients_of_messages_get_anthropics_errors(
    method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    reply = await ask(method, path, headers=headers)
    assert (reply.status, reply.json["type"]) == (status, "error")
    assert reply.json["error"]["type"] == kind
    assert ("is not served" in reply.json["error"]["message"]) is (status == 404)


async def test_slash_behind_a_path_changes_nothing() -> None:
    client = Client(create_app(FakeEngine(), ApiSettings()))
    for path in ("/v1/models", "/health", "/v1/models/demo"):
        wanted = (await client.send("GET", path)).json
        for slashes in ("/", "///"):
            reply = await client.send("GET", path + slashes)
            assert (reply.status, reply.json) == (200, wanted)
    assert (await client.send("POST", "/v1/chat/completions/", CHAT)).status == 200


def test_key_is_required_by_every_route() -> None:
    """Routes added later included."""
    app = create_app(FakeEngine(), ApiSettings(api_key="right"))
    assert all(isinstance(cast("Route", route).app, CheckAccess) for route in app.routes)


async def test_key_guards_websockets_and_lets_lifespan_pass() -> None:
    """Default deny also holds for other protocols than HTTP."""
    app = create_app(FakeEngine(), ApiSettings(api_key="right"))
    sent: list[dict[str, object]] = []
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, str]:
        return incoming.pop(0)

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        sent.append(message)

    await app({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    await app({"type": "lifespan", "state": {}}, receive, send)
    assert sent[-1] == {"type": "lifespan.shutdown.complete"}


@each_case("action", ["drain", "restart", "resume"])
async def test_replicas_are_listed_and_their_actions_done_and_reported(action: str) -> None:
    """A drain that takes too long gets a response, too."""
    engine = FakeEngine()
    engine.state = "degraded"
    listed = await ask("GET", "/admin/replicas", engine=engine)
    assert listed.json == {"state": "degraded", "groups": engine.rows}
    sent = {"group": "generate-1", "action": action}
    reply = await ask("POST", "/admin/replicas", sent, engine=engine)
    assert engine.actions == [(action, "generate-1")]
    assert (reply.status, reply.json) == (200, {**sent, "done": True, "state": "draining"})
    engine.in_time = False
    late = await ask("POST", "/admin/replicas", sent, engine=engine)
    assert (late.status, late.json["done"]) == (200, action == "resume")


async def test_replicas_passes_refusals_on_and_names_the_known_actions() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("it is down. Remedy: wait.", code="wrong_state", status=409)
    sent = {"group": "generate-1", "action": "restart"}
    reply = await ask("POST", "/admin/replicas", sent, engine=engine)
    assert (reply.status, reply.error["code"]) == (409, "wrong_state")
    error = await refusal("/admin/replicas", sent | {"action": "stop"})
    assert error["code"] == "unknown_action"
    assert "name one of drain, restart, resume." in error["message"]
