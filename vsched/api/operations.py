"""Endpoints other than completions: models, tokenize, health, metrics, statistics, clear, groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vsched.api import parameters
from vsched.api.bodies.reading import RequestBodies
from vsched.api.chat_messages import split_messages
from vsched.api.compat.messages import messages_model, messages_model_list
from vsched.api.completions import check_model, check_ready, rendered
from vsched.api.contract import ApiSettings, EngineContract, ServingContract
from vsched.api.errors import ParameterRefused, out_of_bounds
from vsched.api.formatters import text_of, token_text
from vsched.api.http_exchange import HttpExchange, MessagesForm, WireForm, is_anthropic_client
from vsched.api.metrics import CONTENT_TYPE, ApiMetrics
from vsched.api.request_schema import (
    AdapterRequest,
    DetokenizeRequest,
    GroupRequest,
    LoadLoraRequest,
    PolicyTables,
    TokenizeRequest,
    UnloadLoraRequest,
)
from vsched.api.response_schema import (
    AdapterList,
    AdapterRow,
    Detokenized,
    GroupAction,
    Load,
    Model,
    ModelList,
    State,
    Tokens,
    Version,
)
from vsched.api.tools.choice import shown_tools
from vsched.api.unsupported import refuse_unsupported
from vsched.errors import RequestRefused
from vsched.media import ImageReference, Prompt, refuse_images
from vsched.worker.contract import Preprocessor

ACTIONS = ("drain", "restart", "resume")


def json_response(content: object, status: int = 200) -> Response:
    """Encode a JSON response; values that JSON cannot represent become text."""
    body = msgspec.json.encode(content, enc_hook=str)
    return Response(body, status_code=status, media_type="application/json")


class Descriptions:
    """Endpoints that every HTTP process can serve by itself: state, version, models."""

    def __init__(self, engine: ServingContract) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Report the engine's state: 200 if it accepts requests, 503 otherwise."""
        del request
        state = self._engine.state
        return json_response(State(state), 200 if state in {"ready", "degraded"} else 503)

    async def version(self, request: Request) -> Response:
        """Return the version of vsched."""
        del request
        return json_response(Version(version("vsched")))

    async def models(self, request: Request) -> Response:
        """List the model and its adapters, in Anthropic's format if the client is Anthropic's."""
        ready = [row["name"] for row in self._engine.adapters() if row["state"] == "ready"]
        listed = [self._model(), *map(self._model, ready)]
        if is_anthropic_client(request.headers.raw):
            return json_response(messages_model_list(listed))
        return json_response(ModelList(listed))

    async def model(self, request: Request) -> Response:
        """Describe the model or an adapter, in Anthropic's format if the client is Anthropic's."""
        anthropics = is_anthropic_client(request.headers.raw)
        try:
            adapter = check_model(request.path_params["model"], self._engine)
        except ParameterRefused as error:
            form = MessagesForm() if anthropics else WireForm()
            return json_response(form.error(error), error.status)
        described = self._model(adapter)
        return json_response(messages_model(described) if anthropics else described)

    def _model(self, adapter: str = "") -> Model:
        base = self._engine.model_name
        return Model(
            adapter or base,
            self._created,
            self._engine.info.context_tokens,
            root=base,
            parent=base if adapter else None,
        )


class Operations:
    """Operator endpoints that respond at once."""

    def __init__(self, engine: EngineContract, metrics: ApiMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def load(self, request: Request) -> Response:
        """Return the number of completions in progress."""
        del request
        return json_response(Load(self._metrics.under_way))

    async def metrics(self, request: Request) -> Response:
        """Render the metrics."""
        del request
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def statistics(self, request: Request) -> Response:
        """Return the engine's statistics."""
        del request
        return json_response({"state": self._engine.state, **self._engine.statistics()})

    async def clear(self, request: Request) -> Response:
        """Interrupt every request."""
        del request
        return json_response(await self._engine.clear())

    async def replicas(self, request: Request) -> Response:
        """Return all groups: state, ranks, running and waiting requests, last loss."""
        del request
        return json_response({"state": self._engine.state, "groups": self._engine.groups()})

    async def policies(self, request: Request) -> Response:
        """Return the configuration table of the policy that decides for each policy table."""
        del request
        return json_response(self._engine.policies())


class TokenizeEndpoint:
    """An ASGI application for /tokenize."""

    def __init__(
        self, engine: ServingContract, settings: ApiSettings, bodies: RequestBodies
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._tokenize(exchange))

    async def _tokenize(self, exchange: HttpExchange) -> Tokens:
        check_ready(self._engine)  # before that, the model is unknown
        limit = self._engine.info.context_tokens
        request = await self._bodies.read(exchange, TokenizeRequest, tokens=limit)
        check_model(request.model, self._engine)
        refuse_unsupported(request)
        token_ids = await self._engine.tokenize(*self._prompt(request))
        added = request.messages is None
        if request.add_special_tokens not in {None, added}:
            first = self._engine.preprocessor.tokenize("")
            token_ids = token_ids[len(first) :] if added else first + token_ids
        strings: list[str] | None = None
        if request.return_token_strs:
            strings = await asyncio.to_thread(_texts, self._engine.preprocessor, token_ids)
        return Tokens(len(token_ids), limit, token_ids, strings)

    def _prompt(self, request: TokenizeRequest) -> tuple[Prompt, Sequence[ImageReference]]:
        """Prompt and images of a request."""
        match request.prompt, request.messages:
            case str(prompt), None:
                return prompt, ()
            case None, list(sent):
                messages, images = split_messages(sent, self._settings, request.mm_processor_kwargs)
                if images:
                    refuse_images(self._engine.info)
                arguments = parameters.template_arguments(request, self._settings)
                if request.tools:
                    arguments["tools"] = shown_tools(request.tools, self._settings)
                return rendered(self._engine, messages, arguments), images
        message = "one of `prompt` and `messages` is needed. Remedy: send exactly one of them."
        raise ParameterRefused(message, param="prompt")


class DetokenizeEndpoint:
    """An ASGI application for /detokenize."""

    def __init__(self, engine: ServingContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._detokenize(exchange))

    async def _detokenize(self, exchange: HttpExchange) -> Detokenized:
        check_ready(self._engine)
        limit = self._engine.info.context_tokens
        request = await self._bodies.read(exchange, DetokenizeRequest, tokens=limit)
        check_model(request.model, self._engine)
        if len(request.tokens) > limit:
            raise out_of_bounds(
                "tokens",
                value=f"{len(request.tokens)} tokens",
                limit=f"{limit} tokens of context",
                remedy="send fewer at a time",
            )
        parameters.check_vocabulary("tokens", request.tokens, self._engine.info)
        preprocessor = self._engine.preprocessor
        return Detokenized(await asyncio.to_thread(text_of, preprocessor, request.tokens))


def _texts(preprocessor: Preprocessor, token_ids: list[int]) -> list[str]:
    """Text of each token; incomplete characters become replacement characters."""
    return [token_text(one, preprocessor) for one in token_ids]


class PoliciesEndpoint:
    """An ASGI application: replaces the policies of some configuration tables; the response is the table of each."""

    def __init__(self, engine: EngineContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._replace(exchange))

    async def _replace(self, exchange: HttpExchange) -> PolicyTables:
        tables = await self._bodies.read(exchange, PolicyTables, tokens=0)
        self._engine.replace_policies(tables)
        return self._engine.policies()


class ReplicasEndpoint:
    """An ASGI application: one action on one group; it responds when the action is done or its deadline has passed.

    The action continues if the client disconnects: `GET /admin/replicas` reports the result.
    """

    def __init__(self, engine: EngineContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._act(exchange))

    async def _act(self, exchange: HttpExchange) -> GroupAction:
        # Allowed while the engine loads, and without token limits.
        request = await self._bodies.read(exchange, GroupRequest, tokens=0)
        exchange.release_room()  # a drain takes long
        done = True
        match request.action:
            case "drain":
                done = await self._engine.drain_group(request.group)
            case "restart":
                done = await self._engine.restart_group(request.group)
            case "resume":
                self._engine.resume_group(request.group)
            case unknown:
                message = (
                    f"there is no action {unknown!r}. Remedy: name one of {', '.join(ACTIONS)}."
                )
                raise ParameterRefused(message, param="action", code="unknown_action")
        state = next(
            (row["state"] for row in self._engine.groups() if row["name"] == request.group), "down"
        )
        return GroupAction(request.group, request.action, done, state)


TEXT = b"text/plain; charset=utf-8"


class AdapterEndpoints:
    """Adapter endpoints for operators; an operation continues if its client disconnects."""

    def __init__(self, engine: EngineContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def look(self, request: Request) -> Response:
        """List the adapters."""
        del request
        return json_response(AdapterList([AdapterRow(**row) for row in self._engine.adapters()]))

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load an adapter."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._load(exchange))

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unload an adapter."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._unload(scope["path_params"]["name"]))

    async def load_lora(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load an adapter, in vLLM's format."""
        exchange = HttpExchange(scope, receive, send)
        await _answer_in_text(exchange, self._load_lora(exchange))

    async def unload_lora(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unload an adapter, in vLLM's format."""
        exchange = HttpExchange(scope, receive, send)
        await _answer_in_text(exchange, self._unload_lora(exchange))

    async def _load(self, exchange: HttpExchange) -> AdapterRow:
        requested = await self._bodies.read(exchange, AdapterRequest, tokens=0)
        exchange.release_room()  # loading may take long
        await self._engine.load_adapter(requested.name, requested.path)
        return next(
            AdapterRow(**row) for row in self._engine.adapters() if row["name"] == requested.name
        )

    async def _unload(self, name: str) -> AdapterRow:
        row = next((row for row in self._engine.adapters() if row["name"] == name), {})
        await self._engine.unload_adapter(name)
        return AdapterRow(**{**row, "state": "unloaded", "running": 0})

    async def _load_lora(self, exchange: HttpExchange) -> str:
        requested = await self._bodies.read(exchange, LoadLoraRequest, tokens=0)
        exchange.release_room()
        await self._engine.load_adapter(requested.lora_name, requested.lora_path)
        return f"Success: LoRA adapter {requested.lora_name!r} added successfully."

    async def _unload_lora(self, exchange: HttpExchange) -> str:
        requested = await self._bodies.read(exchange, UnloadLoraRequest, tokens=0)
        exchange.release_room()
        await self._engine.unload_adapter(requested.lora_name)
        return f"Success: LoRA adapter {requested.lora_name!r} removed successfully."


class Endpoint:
    """An ASGI application as an object, so that the router passes the connection to it unchanged."""

    def __init__(self, serve: Any) -> None:
        """Wrap a coroutine function that serves a connection."""
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._serve(scope, receive, send)


async def _answer_in_text(exchange: HttpExchange, work: Awaitable[str]) -> None:
    """Send a sentence, or an error with the status that vLLM uses for it."""

    async def answer() -> None:
        try:
            said = await work
        except RequestRefused as error:
            if error.status == 409:
                error.status = 400
            raise
        await exchange.send_bytes(said.encode(), content_type=TEXT)

    await exchange.answer_itself(answer())
