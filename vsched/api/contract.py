"""What the HTTP layer needs of an engine, and the limits it keeps.

The engine is written against nothing here; it only has to look like this. Tests hand in a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.stream import OutputDelta, StopScope
from vsched.media import ImageReference, Prompt
from vsched.record.left import Begun
from vsched.types import ModelInfo, SamplingParams
from vsched.worker.contract import Preprocessor

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and permissions of the HTTP layer.

    Attributes:
        api_key: What clients must send as `Authorization: Bearer <key>`; empty asks for none. `/health` and `/ready`
            are always open.
        admin_key: What opens `/admin/`, in the same form; empty opens it to programs of this machine, with `api_key`.
        tenant_keys: Keys by the tenant whose they are; each opens what `api_key` opens.
        tenant_header: Name of the header that says the tenant, in lower case; empty for none.
        tenants_max: Tenants that have metrics of their own; those after them count together.
        metrics_without_key: Whether `/metrics` is open.
        allowed_hosts: Names in `Host` beside addresses and `localhost`; None for any, `*.` before all under a domain.
        cors_origins: Origins whose pages may call, `*` for any.
        body_bytes_max: Bytes of a request body; counted while it arrives.
        bodies_bytes_max: Bytes of large bodies that are held at a time, over all connections; more wait.
        body_wait_s: Longest wait of a body for room among them.
        strict_fields: Whether a field that nobody knows is refused within messages and other objects, too.
        usage_always: Whether every event of a stream of OpenAI's tells the usage so far, asked for or not.
        root_path: What may stand before every path; empty for nothing.
        messages_max: Messages of one chat request.
        parts_max: Content parts and tool calls of one chat request, over all its messages.
        tools_max: Tools of one chat request.
        tool_format: How the model writes calls, by a name of `CALL_FORMATS`; `auto` asks its chat template.
        reasoning_format: How the model marks reasoning, by a name of `REASONING_FORMATS`, `none` or `auto`.
        stop_max: Stop strings of one request.
        stop_characters_max: Characters of one stop string.
        stop_token_ids_max: Stop tokens of one request.
        logit_bias_max: Tokens of one request with a bias.
        bad_words_max: Words of one request that are not to be generated.
        logprobs_max: Alternatives reported a token.
        answers_max: Answers of one request: its prompts times `n`, or times `best_of`.
        cache_salt_characters_max: Characters of a cache salt.
        template_arguments: Names that `chat_template_kwargs` may set.
    """

    api_key: str = ""
    admin_key: str = ""
    tenant_keys: dict[str, str] = {}
    tenant_header: str = ""
    tenants_max: _Positive = 64
    metrics_without_key: bool = False
    allowed_hosts: tuple[str, ...] | None = ()
    cors_origins: tuple[str, ...] = ()
    body_bytes_max: _Positive = 32 * 1024 * 1024
    bodies_bytes_max: _Positive = 256 * 1024 * 1024
    body_wait_s: _Seconds = 30.0
    strict_fields: bool = False
    usage_always: bool = False
    root_path: str = ""
    messages_max: _Positive = 1024
    parts_max: _Positive = 4096
    tools_max: _Positive = 128
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    stop_max: _Positive = 16
    stop_characters_max: _Positive = 256
    stop_token_ids_max: _Positive = 64
    logit_bias_max: _Positive = 1024
    bad_words_max: _Positive = 64
    logprobs_max: _Positive = 20
    answers_max: _Positive = 128
    cache_salt_characters_max: _Positive = 256
    template_arguments: tuple[str, ...] = ("add_vision_id", "enable_thinking")


class Generation(Protocol):
    """One accepted request: an asynchronous iterator of deltas.

    Iterating raises `RequestFailed` when the request ends in an error. `cached_tokens` is valid from the first delta
    on and 0 before it.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prompt_report(self) -> PromptReport | None: ...

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...
    async def __anext__(self) -> OutputDelta: ...

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Have the reader called, on the event loop, whenever there may be something to take; None ends that.

        What was there before is not told. A generation is iterated or subscribed to, not both.
        """
        ...

    def one_by_one(self) -> None:
        """From now on, let each delta have one token, so that they are the same whenever they are taken."""
        ...

    def take(self) -> OutputDelta | None:
        """Return the next delta; None when there is none yet, or the last one was taken.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        ...

    def abort(self) -> None:
        """Free everything the request holds within one step; after its end this does nothing."""
        ...


class ServingContract(Protocol):
    """The engine as clients' requests see it, also in a process beside the engine's."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def preprocessor(self) -> Preprocessor: ...
    @property
    def model_name(self) -> str: ...

    @property
    def state(self) -> str:
        """One of `loading`, `ready`, `degraded`, `failed`, `draining`, `stopped`."""
        ...

    async def generate_answers(
        self,
        *,
        prompt: Prompt,
        images: Sequence[ImageReference],
        sampling: SamplingParams,
        request_ids: Sequence[str],
        priority: int = 0,
        ttft_target_ms: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: str = "",
        begun: Begun | None = None,
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> Sequence[Generation]:
        """Prepare the images, submit a request for as many answers as there are ids, and return once it is accepted.

        The answers differ in their seeds; all are accepted or none. `sampling.max_tokens` of 0 means as many as the
        context leaves after the prompt. `adapter` names one that is loaded. `begun` is what a dead engine told of the
        one answer: it goes on from there. `make_stop_scope` returns a `StopScope`, which limits stop strings to parts
        of the text; by default they apply everywhere. Cancelling this call undoes everything.

        Raises:
            RequestRefused: When the request cannot be accepted.
        """
        ...

    async def tokenize(self, prompt: Prompt, images: Sequence[ImageReference] = ()) -> list[int]:
        """Return the token ids of a text that could be a prompt, those of its images among them.

        Raises:
            RequestRefused: When `generate_answers` would not take it.
        """
        ...

    def adapters(self) -> list[dict[str, Any]]:
        """Return every adapter as an operator sees it."""
        ...


class EngineContract(ServingContract, Protocol):
    """The engine as the HTTP layer sees it in its own process."""

    def statistics(self) -> dict[str, Any]:
        """Return nested dictionaries of what was counted and measured."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter: when this returns, requests may name it.

        Raises:
            RequestRefused: When it cannot be loaded.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away.

        Raises:
            RequestRefused: When there is none of this name, or it is on its way already.
        """
        ...

    async def clear(self) -> dict[str, int]:
        """Interrupt every request, those in preparation included; return what is left: 0 `running`, 0 `waiting`."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """Return every group as an operator sees it."""
        ...

    async def drain_group(self, group: str) -> bool:
        """Give a group nothing new; return whether it had nothing to do any more within the deadline.

        Raises:
            RequestRefused: With the groups that there are, or the state that does not allow it.
        """
        ...

    async def restart_group(self, group: str) -> bool:
        """Replace the ranks of a group; return whether it is back.

        Raises:
            RequestRefused: With the groups that there are, or the state that does not allow it.
        """
        ...

    def resume_group(self, group: str) -> None:
        """Give a drained group work again.

        Raises:
            RequestRefused: With the groups that there are, or the state that does not allow it.
        """
        ...
