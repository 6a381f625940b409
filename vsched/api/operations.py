"""Endpoints other than completions: models, tokenize, health and those for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec

from vsched.api import parameters
from vsched.api.bodies import RequestBodies
from vsched.api.chat_messages import split_messages
from vsched.api.compat.messages import (
    MessagesModel,
    MessagesModelList,
    messages_model,
    messages_model_list,
)
from vsched.api.completions import check_model, check_ready, rendered
from vsched.api.contract import EngineContract, ServingContract
from vsched.api.errors import ParameterRefused, out_of_bounds
from vsched.api.formatters import text_of, token_text
from vsched.api.http_exchange import HttpExchange, is_anthropic_client
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
from vsched.errors import ConfigError, RequestRefused
from vsched.media import ImageReference, Prompt, refuse_images
from vsched.plugins import import_policies

ACTIONS = ("drain", "restart", "resume")
LIVE_EVERY_S = 0.5
"""Interval of the states in a stream."""

Body = TypeVar("Body")


class ClientOperations:
    """Endpoints for clients, which every HTTP process serves by itself: models, tokens, state and version."""

    def __init__(self, engine: ServingContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies
        self._created = int(time.time())

    async def read_body(self, exchange: HttpExchange, kind: type[Body]) -> Body:
        """Read a body, once the model is known.

        Raises:
            RequestRefused: If the engine is not ready, or the body is invalid.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        check_ready(self._engine)
        return await self._bodies.read_body(exchange, kind, tokens=self._engine.info.context_tokens)

    async def health(self, exchange: HttpExchange) -> None:
        """State of the engine: 200 if it accepts requests, 503 otherwise."""
        state = self._engine.state
        status = 200 if state in {"ready", "degraded"} else 503
        await exchange.send_json(State(state), status=status)

    async def version(self) -> Version:
        """Version of vsched."""
        return Version(version("vsched"))

    async def models(self, exchange: HttpExchange) -> ModelList | MessagesModelList:
        """List the model and its adapters, in Anthropic's format with the header anthropic-version."""
        ready = [row["name"] for row in self._engine.adapters() if row["state"] == "ready"]
        listed = [self._model(), *map(self._model, ready)]
        if is_anthropic_client(exchange.scope["headers"]):
            return messages_model_list(listed)
        return ModelList(listed)

    async def model(self, exchange: HttpExchange) -> Model | MessagesModel:
        """Describe the model or an adapter, in Anthropic's format with the header anthropic-version."""
        described = self._model(check_model(exchange.scope["path_params"]["model"], self._engine))
        is_anthropic = is_anthropic_client(exchange.scope["headers"])
        return messages_model(described) if is_anthropic else described

    def _model(self, adapter: str = "") -> Model:
        check_ready(self._engine)  # before, its context is unknown
        base = self._engine.model_name
        return Model(
            adapter or base,
            self._created,
            self._engine.info.context_tokens,
            root=base,
            parent=base if adapter else None,
        )

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Tokenize a prompt, or rendered messages with their images, and count the tokens."""
        check_model(request.model, self._engine)
        refuse_unsupported(request)
        token_ids = await self._engine.tokenize(*self._prompt(request))
        added = request.messages is None
        if request.add_special_tokens not in {None, added}:
            first = self._engine.preprocessor.tokenize("")
            token_ids = token_ids[len(first) :] if added else first + token_ids
        strings: list[str] | None = None
        if request.return_token_strs:
            strings = await asyncio.to_thread(
                lambda: [token_text(one, self._engine.preprocessor) for one in token_ids]
            )
        return Tokens(len(token_ids), self._engine.info.context_tokens, token_ids, strings)

    def _prompt(self, request: TokenizeRequest) -> tuple[Prompt, Sequence[ImageReference]]:
        """Prompt and images of a request."""
        match request.prompt, request.messages:
            case str(prompt), None:
                return prompt, ()
            case None, list(sent):
                messages, images = split_messages(
                    sent, request.mm_processor_kwargs, request.media_io_kwargs
                )
                if images:
                    refuse_images(self._engine.info, images)
                arguments = parameters.template_arguments(request, self._engine.preprocessor)
                if request.tools:
                    arguments["tools"] = shown_tools(request.tools)
                return rendered(self._engine, messages, arguments), images
        message = "one of `prompt` and `messages` is needed. Remedy: send exactly one of them."
        raise ParameterRefused(message, param="prompt")

    async def detokenize(self, request: DetokenizeRequest) -> Detokenized:
        """Convert tokens to text."""
        check_model(request.model, self._engine)
        limit = self._engine.info.context_tokens
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


class OperatorOperations:
    """Endpoints for operators, which need the engine; an action continues if its client disconnects."""

    def __init__(self, engine: EngineContract, metrics: ApiMetrics, bodies: RequestBodies) -> None:
        self._engine = engine
        self._metrics = metrics
        self._state = msgspec.Raw()
        self._state_s: float | None = None
        self._bodies = bodies

    async def read_body(self, exchange: HttpExchange, kind: type[Body]) -> Body:
        """Read a body, in any state of the engine.

        Raises:
            RequestRefused: If it is invalid.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        request = await self._bodies.read_body(exchange, kind, tokens=0)
        exchange.release_room()  # the action may take long
        return request

    async def load(self) -> Load:
        """Number of completions in progress."""
        return Load(self._metrics.under_way)

    async def metrics(self, exchange: HttpExchange) -> None:
        """Metrics for Prometheus."""
        content_type = CONTENT_TYPE.encode()
        await exchange.send_bytes(self._metrics.render(), content_type=content_type)

    async def statistics(self) -> dict[str, Any]:
        """Counters and measurements of the engine."""
        return {"state": self._engine.state, **self._engine.statistics()}

    async def live(self, exchange: HttpExchange) -> msgspec.Raw | None:
        """State of requests, memory and policies; a stream if server-sent events are accepted."""
        accepted = exchange.header(b"accept") or b""
        # The scope of a request from an API process has no server: its response cannot be streamed.
        if b"text/event-stream" not in accepted or exchange.scope.get("server") is None:
            return self._live_state()
        await exchange.start_stream()
        await exchange.until_disconnect(self._send_states(exchange))
        return None

    async def _send_states(self, exchange: HttpExchange) -> None:
        while self._engine.state != "stopped":
            await exchange.send_event(self._live_state())
            await asyncio.sleep(LIVE_EVERY_S)
        await exchange.end_stream()

    def _live_state(self) -> msgspec.Raw:
        """Return the encoded state, which all open pages share."""
        now_s = asyncio.get_running_loop().time()
        if self._state_s is None or now_s >= self._state_s + LIVE_EVERY_S / 2:
            self._state_s = now_s
            self._state = msgspec.Raw(msgspec.json.encode(self._engine.live(), enc_hook=str))
        return self._state

    async def clear(self) -> dict[str, int]:
        """Abort every request."""
        return await self._engine.clear()

    async def replicas(self) -> dict[str, Any]:
        """All groups: state, ranks, running and waiting requests, last loss."""
        return {"state": self._engine.state, "groups": self._engine.groups()}

    async def change_replica(self, request: GroupRequest) -> GroupAction:
        """Drain, restart or resume a group; respond when it is done or its deadline has passed."""
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
        states = {row["name"]: row["state"] for row in self._engine.groups()}
        return GroupAction(request.group, request.action, done, states.get(request.group, "down"))

    async def policies(self) -> PolicyTables:
        """Configuration table of the policy that decides for each policy table."""
        return self._engine.policies()

    async def replace_policies(self, request: PolicyTables) -> PolicyTables:
        """Replace the policies of some configuration tables; return the table of each."""
        try:  # in a thread, because an import may take longer than ranks wait for the engine
            await asyncio.to_thread(import_policies, request)
        except ConfigError as error:
            raise RequestRefused(str(error), code="invalid_policy") from error
        self._engine.replace_policies(request)
        return self._engine.policies()

    async def adapters(self) -> AdapterList:
        """All adapters."""
        return AdapterList(list(self._adapters().values()))

    def _adapters(self) -> dict[str, AdapterRow]:
        return {row["name"]: AdapterRow(**row) for row in self._engine.adapters()}

    async def load_adapter(self, request: AdapterRequest) -> AdapterRow:
        """Load an adapter."""
        await self._engine.load_adapter(request.name, request.path)
        return self._adapters()[request.name]

    async def unload_adapter(self, exchange: HttpExchange) -> AdapterRow:
        """Unload an adapter."""
        name = exchange.scope["path_params"]["name"]
        row = self._adapters().get(name)
        await self._engine.unload_adapter(name)  # refused if there is none
        assert row is not None
        return msgspec.structs.replace(row, state="unloaded", running=0)

    async def load_lora_adapter(self, request: LoadLoraRequest) -> str:
        """Load an adapter, in vLLM's format."""
        name = request.lora_name
        return await _text_of_change(
            self._engine.load_adapter(name, request.lora_path), name, "added"
        )

    async def unload_lora_adapter(self, request: UnloadLoraRequest) -> str:
        """Unload an adapter, in vLLM's format."""
        name = request.lora_name
        return await _text_of_change(self._engine.unload_adapter(name), name, "removed")


async def _text_of_change(change: Awaitable[None], name: str, action: str) -> str:
    """Return vLLM's text about a change of adapters; a conflict has status 400, as in vLLM."""
    try:
        await change
    except RequestRefused as error:
        error.status = 400 if error.status == 409 else error.status
        raise
    return f"Success: LoRA adapter {name!r} {action} successfully."
