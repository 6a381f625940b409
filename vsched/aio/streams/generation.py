"""A request as the caller of `Engine.generate` has it: when it can be read no more, it ends.

The engine holds on to the `TokenStream` that tokens go to, so that one is never garbage while its request runs. What
the caller gets is another object, which only the caller holds on to.
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

    The request ends at once, with all that it holds, when its reader leaves: when an `async for` over it is left by
    `break`, `return` or an exception, when a task that waits for its next delta is cancelled, when it is closed, and
    when it is garbage. After its end, all of this does nothing. To read some deltas now and the rest later, use
    `anext(generation)`. Iterating raises `RequestFailed` when the request ended in an error.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # Called for every token of a server.
        self.take: Callable[[], OutputDelta | None] = stream.take

    @property
    def request_id(self) -> str:
        """The id that the caller gave it."""
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt, placeholders of images included."""
        return self._stream.prompt_token_ids

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return self._stream.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; known once the request has ended."""
        return self._stream.cached_tokens

    @property
    def output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return self._stream.output_tokens

    @property
    def times(self) -> RequestTimes:
        """When it was submitted, started and ended; known once the request has ended."""
        return self._stream.times

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._stream.reason

    @property
    def prompt_report(self) -> PromptReport | None:
        """Log-probabilities of the prompt, in one of several answers; None without `prompt_logprobs`."""
        return self._stream.prompt_report

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return _Iteration(self)

    async def __anext__(self) -> OutputDelta:
        """Return the next delta.

        Blocks: until a token or the end comes; the leader's step deadline bounds that. Cancelling ends the request.

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
        """End the request; there are no more deltas. `contextlib.aclosing` calls it."""
        self._closed = True
        self.abort()

    def abort(self) -> None:
        """End the request and free all that it holds; the last delta says so. After its end this does nothing."""
        self._stream.abort()

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Have the reader called when there may be something to take; see `TokenStream.subscribe`."""
        self._stream.subscribe(reader)

    def one_by_one(self) -> None:
        """From now on, let each delta have one token; see `TokenStream.one_by_one`."""
        self._stream.one_by_one()

    def abort_soon(self) -> None:
        """End the request from a finalizer, which runs anywhere: in the middle of a step, or in another thread."""
        if self._stream.reason is not None:
            return
        with contextlib.suppress(RuntimeError):  # when the loop is closed, and the engine with it
            self._loop.call_soon_threadsafe(self._stream.abort)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):  # else there was no loop to make it on
            self.abort_soon()


class _Iteration:
    """One `async for` over a generation; it is garbage as soon as that is left."""

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
