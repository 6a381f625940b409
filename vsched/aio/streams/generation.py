"""The caller's handle of a request, returned by `Engine.generate`; the request ends when the handle is dropped.

The engine holds a reference to the `TokenStream` while the request runs, so a `TokenStream` is never garbage-collected
before its end. Only the caller refers to the `Generation`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.stream import OutputDelta, TokenStream
from vsched.kernel.commands import RequestTimes
from vsched.types import FinishReason


class Generation:
    """One accepted request: an asynchronous iterator of deltas, for a single reader.

    The request is aborted, and its slot and blocks are freed, as soon as an `async for` over it is left by `break`,
    `return` or an exception, a task that awaits its next delta is cancelled, it is closed, or it is garbage-collected.
    After the request has ended, these have no effect. To read some deltas now and the rest later, use
    `anext(generation)`. Iteration raises `RequestFailed` if the request ended in an error.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # Bound here, since a server calls it for every token.
        self.take: Callable[[], OutputDelta | None] = stream.take

    @property
    def request_id(self) -> str:
        """The id that the caller passed."""
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, including image placeholders."""
        return self._stream.prompt_token_ids

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return self._stream.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache; known once the request has ended."""
        return self._stream.cached_tokens

    @property
    def output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return self._stream.output_tokens

    @property
    def times(self) -> RequestTimes:
        """Times of submission, start and end; known once the request has ended."""
        return self._stream.times

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason; None while the request runs."""
        return self._stream.reason

    @property
    def prompt_report(self) -> PromptReport | None:
        """Log-probabilities of the prompt, shared by the choices of a request; None without `prompt_logprobs`."""
        return self._stream.prompt_report

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return _Iteration(self)

    async def __anext__(self) -> OutputDelta:
        """Return the next delta.

        Blocks: until a token or the end arrives; the leader's step deadline bounds that. Cancelling aborts the request.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            return await anext(self._stream)
        except asyncio.CancelledError:
            self.abort()
            raise

    async def aclose(self) -> None:
        """Abort the request and end the iteration; `contextlib.aclosing` calls this."""
        self._closed = True
        self.abort()

    def abort(self) -> None:
        """Abort the request and free its slot and blocks; the last delta has the finish reason. No-op after its end."""
        self._stream.abort()

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Call `reader` when `take` may return a delta; see `TokenStream.subscribe`."""
        self._stream.subscribe(reader)

    def one_by_one(self) -> None:
        """Return one token per delta from now on; see `TokenStream.one_by_one`."""
        self._stream.one_by_one()

    def abort_soon(self) -> None:
        """Schedule an abort, for finalizers: they may run in the middle of a step or in another thread."""
        if self._stream.reason is not None:
            return
        with contextlib.suppress(RuntimeError):  # the loop, and thus the engine, is closed
            self._loop.call_soon_threadsafe(self._stream.abort)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):  # __init__ fails without a running loop
            self.abort_soon()


class _Iteration:
    """The iterator of one `async for` over a generation; it is garbage-collected when the loop is left."""

    __slots__ = ("_generation",)

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __aiter__(self) -> _Iteration:
        return self

    async def __anext__(self) -> OutputDelta:
        return await self._generation.__anext__()

    async def aclose(self) -> None:
        await self._generation.aclose()

    def __del__(self) -> None:
        self._generation.abort_soon()
