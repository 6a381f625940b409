"""The engine's end of the link to one API process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial

from starlette.types import ASGIApp

from vsched.aio.serving import RunningParts
from vsched.aio.streams.sink import Answering
from vsched.api.processes.asgi import respond
from vsched.api.processes.messages import (
    AcceptedRequest,
    Arrive,
    Ask,
    Counted,
    End,
    Facts,
    GiveUp,
    Refusal,
    Submit,
    TakesRequests,
    Tokenize,
    Tokenized,
    Up,
)
from vsched.api.processes.outbox import RelayedAnswer, TurnBox
from vsched.engine import Engine
from vsched.errors import RequestFailed, RequestRefused
from vsched.media.pipeline import PreparedRequest

logger = logging.getLogger(__name__)


class Desk:
    """Serves one process and tracks its requests; `operations` handles its forwarded HTTP requests."""

    def __init__(
        self,
        engine: Engine,
        box: TurnBox,
        *,
        operations: ASGIApp,
        on_life: Callable[[TakesRequests | Counted], None],
    ) -> None:
        self._engine = engine
        self._box = box
        self._operations = operations
        self._on_life = on_life
        self._arriving: dict[int, tuple[asyncio.Task[None], asyncio.Future[Submit]]] = {}
        self._live: dict[int, RelayedAnswer] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._reported: Facts | None = None

    def take(self, messages: list[Up]) -> None:
        """Handle messages from the process."""
        for message in messages:
            match message:
                case Arrive(number=number):
                    submitted: asyncio.Future[Submit] = self._loop.create_future()
                    task = self._loop.create_task(self._serve(message, submitted))
                    self._arriving[number] = (task, submitted)
                case Submit(number=number):
                    arriving = self._arriving.get(number)
                    if arriving is not None and not arriving[1].done():
                        arriving[1].set_result(message)
                case GiveUp():
                    self._give_up(message)
                case End(number=number, reason=reason):
                    if number in self._live:
                        self._live[number].end(reason)
                case Tokenize():
                    self._call(self._tokenize(message))
                case Ask():
                    self._call(self._ask(message))
                case TakesRequests() | Counted():
                    self._on_life(message)

    def tell_facts(self) -> None:
        """Send the engine's state and adapters to the process, if they have changed."""
        facts = Facts(self._engine.state, self._engine.adapters())
        if facts != self._reported:
            self._reported = self._box.turn.facts = facts

    # --- requests ---

    async def _serve(self, arrive: Arrive, submitted: asyncio.Future[Submit]) -> None:
        number = arrive.number
        try:
            choices = await self._engine.accept(
                arrive.request,
                arrive.request_ids,
                adapter=arrive.adapter,
                images=arrive.images,
                prepare=partial(self._prepared, arrive, submitted),
                make_answer=partial(self._answer, arrive),
                started=arrive.started,
            )
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(number, error))
        else:
            self._live.update((one.number, one) for one in choices if one.reason is None)
            # The process has the token ids of text prompts, but not those of prompts with images.
            ids = choices[0].prompt_token_ids if arrive.images else None
            self._box.turn.accepted.append(AcceptedRequest(number, ids))
        finally:
            del self._arriving[number]

    def _answer(self, arrive: Arrive, answering: Answering) -> RelayedAnswer:
        number = arrive.number + arrive.request_ids.index(answering.request_id)
        return RelayedAnswer(answering, number, self._box, self._ended)

    def _ended(self, number: int) -> None:
        self._live.pop(number, None)

    async def _prepared(
        self, arrive: Arrive, submitted: asyncio.Future[Submit], parts: RunningParts
    ) -> PreparedRequest:
        """Wait for the process to tokenize the prompt, then prepare the images.

        Blocks: until the process has tokenized it, within its `media.prepare_s`; the loss of its link cancels this.
        """
        with parts.media.place(arrive.images):
            self._box.turn.entered.append(arrive.number)
            submit = await submitted
        images = [image.reference for image in submit.images]
        return await parts.media.prepare(submit.token_ids, images, arrive.request.cache_salt)

    def _give_up(self, message: GiveUp) -> None:
        arriving = self._arriving.get(message.number)
        if arriving is not None:
            arriving[0].cancel()
        for number in range(message.number, message.number + message.choices):
            if number in self._live:
                self._live[number].abort()

    # --- requests with a single reply ---

    def _call(self, work: Coroutine[None, None, None]) -> None:
        call = self._loop.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _tokenize(self, requested: Tokenize) -> None:
        try:
            images = [image.reference for image in requested.images]
            token_ids = await self._engine.tokenize(requested.token_ids, images)
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(requested.number, error))
        else:
            self._box.turn.tokenized.append(Tokenized(requested.number, token_ids))

    async def _ask(self, requested: Ask) -> None:
        try:
            reply = await respond(self._operations, requested)
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(requested.number, error))
        else:
            self._box.turn.replies.append(reply)

    def close(self) -> None:
        """Abort all requests of the process, which is gone."""
        for task, _ in list(self._arriving.values()):
            task.cancel()
        for answer in list(self._live.values()):
            answer.abort()


def _refusal(number: int, error: Exception) -> Refusal:
    if not isinstance(error, RequestRefused | RequestFailed):
        logger.error("a request of an API process failed", exc_info=error)
    return Refusal.of(number, error)
