"""Outgoing messages of a link, collected until the end of an event loop iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.sink import Answering
from vsched.aio.streams.stream import TokenLogprob, broken
from vsched.api.processes.link import Link
from vsched.api.processes.messages import Turn, Up
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason
from vsched.wire import PromptPiece


class UpBox:
    """Messages of an API process, in order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Up] = []
        self._large = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    def put(self, message: Up) -> None:
        """Send a message, together with the others of this iteration."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(message)

    async def put_large(self, message: Up) -> None:
        """Send a large message after all earlier ones, once the engine has read previous large messages.

        Blocks: until then, or until the link is lost.
        """
        async with self._large:
            await self._link.writable()
            self.flush()
            self._link.send([message])

    def flush(self) -> None:
        """Send the collected messages."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._link.send(waiting)


class TurnBox:
    """Messages of the engine to one process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turn: Turn | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def turn(self) -> Turn:
        """Messages to be sent at the end of this iteration."""
        if self._turn is None:
            self._turn = Turn()
            self._loop.call_soon(self.flush)
        return self._turn

    def flush(self) -> None:
        """Send the collected messages."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._link.send(turn)


class _RelayedReport(PromptReport):
    """Forwards prompt log-probabilities."""

    def __init__(self, box: TurnBox, number: int) -> None:
        super().__init__((), 0)
        self._box = box
        self._number = number

    def take(self, piece: PromptPiece) -> None:
        """Forward a piece, with the number that the process uses."""
        self._box.turn.prompts.append(msgspec.structs.replace(piece, number=self._number))


class RelayedAnswer:
    """An accepted choice that is detokenized in an API process: its tokens and its end are forwarded.

    Attributes:
        number: Number that the process uses.
        output_tokens: Forwarded tokens; the process may find a stop string before the last one.
    """

    def __init__(
        self, answering: Answering, number: int, box: TurnBox, on_end: Callable[[int], None]
    ) -> None:
        self.request_id = answering.request_id
        self.number = number
        self.prompt_token_ids = answering.prompt_token_ids
        self.prompt_tokens = len(answering.prompt_token_ids)
        self.output_tokens = 0
        self.times = RequestTimes()
        self.reason: FinishReason | None = None
        self.prompt_report: PromptReport | None = (
            None if answering.report is None else _RelayedReport(box, number)
        )
        self._box = box
        self._answering = answering
        self._on_end = on_end
        self._broken = ""

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Forward a token."""
        turn = self._box.turn
        if logprob is not None:
            turn.logprobs[len(turn.tokens)] = logprob
        turn.numbers.append(self.number)
        turn.tokens.append(token_id)
        self.output_tokens += 1

    def finish(self, finish: Finish) -> None:
        """Forward the single terminal reply."""
        assert self.reason is None, "a request has two terminal replies"
        if self._broken:
            finish = broken(finish, self._broken)
        self.reason, self.times = finish.reason, finish.times
        self._box.turn.finished.append(msgspec.structs.replace(finish, number=self.number))
        self._on_end(self.number)
        self._answering.on_end()

    def give_up(self, message: str) -> None:
        """Report this error to the client instead of the actual end."""
        self._broken = message

    def abort(self) -> None:
        """Abort it; no-op after its end."""
        self.end(FinishReason.ABORT)

    def end(self, reason: FinishReason) -> None:
        """End it early; no-op after its end."""
        if self.reason is None:
            self._answering.on_stop(self.request_id, reason)

    def deliver(self) -> None:
        """No-op: messages are sent at the end of the iteration."""
