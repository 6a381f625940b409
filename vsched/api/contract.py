"""Engine interface of the HTTP layer, as a protocol, and the limits of the HTTP layer.

The engine does not depend on this module, so tests can pass a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from vsched.aio.live import LiveState
from vsched.aio.streams import OutputDelta, PromptReport, StopScope
from vsched.config.sections import ServerConfig
from vsched.kernel.commands import RequestTimes
from vsched.media import ImageReference, Prompt
from vsched.record.journal import PartialOutput
from vsched.types import FinishReason, ModelInfo, SamplingParams
from vsched.worker.contract import Preprocessor


class ApiSettings(ServerConfig, frozen=True, kw_only=True):
    """Limits and permissions of the HTTP layer: the section `server`, resolved, and what is not configured there.

    Attributes:
        api_key: Key of clients, sent as `Authorization: Bearer <key>`; empty for no key. `/health` and `/ready` need
            none.
        admin_key: Key for `/admin/`, sent in the same way; if empty, `/admin/` is open to local programs, with
            `api_key`.
        tenant_keys: Keys by tenant; each grants the same access as `api_key`.
        allowed_hosts: Names allowed in `Host`, besides addresses and `localhost`, as in the section; `*` for any.
        body_wait_s: Maximum wait of a body for memory within `bodies_bytes_max`.
        tool_format: Tool-call format of the model, a name in `CALL_FORMATS`; `auto` derives it from the chat template.
        reasoning_format: Reasoning format of the model, a name in `REASONING_FORMATS`, `none` or `auto`.
        traces_url: URL for OpenTelemetry spans; empty for no traces.
    """

    api_key: str = ""
    admin_key: str = ""
    tenant_keys: dict[str, str] = msgspec.field(default_factory=dict)
    allowed_hosts: tuple[str, ...] = ()
    traces_url: str = ""
    body_wait_s: float = 30.0
    tool_format: str = "auto"
    reasoning_format: str = "auto"


class GenerationContract(Protocol):
    """One accepted request: an asynchronous iterator of deltas.

    Iteration raises `RequestFailed` if the request ends in an error. `cached_tokens` is valid from the first delta on,
    and 0 before.
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
    @property
    def times(self) -> RequestTimes: ...
    @property
    def reason(self) -> FinishReason | None: ...

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...
    async def __anext__(self) -> OutputDelta: ...

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Call the reader on the event loop whenever there may be new deltas; None unsubscribes.

        Earlier deltas are not announced. Use either iteration or a subscription for a generation, not both.
        """
        ...

    def one_by_one(self) -> None:
        """From now on, return one token per delta, so that deltas do not depend on the time of reading."""
        ...

    def take(self) -> OutputDelta | None:
        """Return the next delta; None if there is none yet, or no further one.

        Raises:
            RequestFailed: If the request ended in an error.
        """
        ...

    def abort(self) -> None:
        """Abort the request and release its resources within one step; no-op after its end."""
        ...


class ServingContract(Protocol):
    """Engine interface for clients' requests, also available in API processes."""

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

    async def generate_choices(
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
        started: PartialOutput | None = None,
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> Sequence[GenerationContract]:
        """Prepare the images, submit a request with one choice per id, and return once it is accepted.

        The choices differ in their seeds; either all are accepted or none. `sampling.max_tokens` of 0 means up to the
        end of the context. `adapter` is the name of a loaded adapter. `started` is the part of a single choice that an
        earlier engine generated before it died: generation continues after it. `make_stop_scope` returns a `StopScope`,
        which limits stop strings to parts of the text; by default they apply everywhere. Cancelling this call undoes
        everything.

        Raises:
            RequestRefused: If the request cannot be accepted.
        """
        ...

    async def tokenize(self, prompt: Prompt, images: Sequence[ImageReference] = ()) -> list[int]:
        """Tokenize a prompt, including its images.

        Raises:
            RequestRefused: If `generate_choices` would refuse it.
        """
        ...

    def adapters(self) -> list[dict[str, Any]]:
        """Return all adapters, with the details for operators."""
        ...


class EngineContract(ServingContract, Protocol):
    """Engine interface of the HTTP layer in the engine's process; see `vsched.engine.Engine`."""

    def statistics(self) -> dict[str, Any]: ...
    def live(self) -> LiveState: ...
    async def load_adapter(self, name: str, path: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
    def policies(self) -> dict[str, dict[str, Any]]: ...
    def replace_policies(self, tables: Mapping[str, dict[str, Any]]) -> None: ...
    async def clear(self) -> dict[str, int]: ...
    def groups(self) -> list[dict[str, Any]]: ...
    async def drain_group(self, group: str) -> bool: ...
    async def restart_group(self, group: str) -> bool: ...
    def resume_group(self, group: str) -> None: ...
