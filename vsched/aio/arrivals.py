"""Requests between their arrival and their submission to the kernel, and errors for those that it refuses.

They wait for the decision of the arrival policy, or their images and prompts are being prepared. Until its tokens are
known, a request belongs to no group, and the task that prepares it is its only state. So it is counted and interrupted
here, with the same error that a request waiting in the kernel gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

from vsched.errors import RequestRefused, VschedError, limit_message
from vsched.kernel.commands import AdmitArrival, RefusalCode, Refuse, RejectArrival
from vsched.kernel.events import Arrived, Event, Withdrawn

REDIRECT = 307
"""HTTP status of a redirect that keeps method and body."""


class PendingArrival:
    """A request that is not submitted yet; see `PendingArrivals.begin`.

    Attributes:
        arrival_id: Its id in the kernel, unique among all arrivals.
        failure: The error with which it was interrupted.
        tenant: Its tenant; empty if unknown.
    """

    def __init__(
        self,
        arrivals: PendingArrivals,
        arrival_id: int,
        request_id: str,
        task: asyncio.Task[object],
        arrived_ns: int,
    ) -> None:
        self.arrival_id = arrival_id
        self.request_id = request_id
        self.arrived_ns = arrived_ns
        self.tenant = ""
        self.failure: VschedError | None = None
        self._arrivals = arrivals
        self._task = task
        self._expected = False
        self._decision: asyncio.Future[RejectArrival | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def admit(self, event: Arrived) -> None:
        """Ask the kernel to admit the request; `event` has its `arrival_id`.

        Blocks: while the policy holds the request, at most a minute.

        Raises:
            RequestRefused: When the policy sheds or redirects it.
        """
        self._expected = True
        self.tenant = event.tenant
        self._arrivals.handle(event)
        decision = self._decision
        rejected = decision.result() if decision.done() else await decision
        if rejected is not None:
            self._expected = False
            raise rejection_error(rejected)

    def decide(self, command: AdmitArrival | RejectArrival) -> None:
        if not self._decision.done():
            self._decision.set_result(command if isinstance(command, RejectArrival) else None)

    def interrupt(self, failure: VschedError) -> None:
        """End the request with an error, even if the awaited result is ready by now."""
        self.failure = failure
        self._task.cancel()
        self._arrivals.remove(self.arrival_id)

    def submitted(self) -> int:
        """Remove the request, because it is submitted now; return its id if it was admitted, else 0."""
        self._arrivals.remove(self.arrival_id)
        expected, self._expected = self._expected, False
        return self.arrival_id if expected else 0

    def leave(self) -> None:
        """Remove the request, and withdraw it from the kernel if that expects its submission."""
        if arrival_id := self.submitted():
            self._arrivals.handle(Withdrawn(arrival_id))


class PendingArrivals:
    """The requests that are not submitted yet, oldest first; `handle` passes events to the kernel."""

    def __init__(
        self,
        handle: Callable[[Event], None] = lambda _event: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.handle = handle
        self._now_ns = now_ns
        self._live: dict[int, PendingArrival] = {}
        self._last = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def begin(self, request_id: str) -> Iterator[PendingArrival]:
        """Register a request of the current task until it is submitted or the context is left.

        If the request is interrupted, the context raises that error in place of the task's cancellation.
        """
        task = asyncio.current_task()
        assert task is not None
        self._last += 1
        arrival = self._live[self._last] = PendingArrival(
            self, self._last, request_id, task, self._now_ns()
        )
        self._idle.clear()
        cancelling = task.cancelling()
        try:
            yield arrival
        except asyncio.CancelledError:
            # The client may have cancelled the task as well; that cancellation has to go on.
            if arrival.failure is None or task.uncancel() > cancelling:
                raise
            raise arrival.failure from None
        finally:
            arrival.leave()

    def decide(self, command: AdmitArrival | RejectArrival) -> None:
        arrival = self._live.get(command.arrival_id)
        if arrival is not None:
            arrival.decide(command)

    def interrupt(self, failure: VschedError) -> None:
        """End all requests with this error; afterwards none is counted."""
        for arrival in list(self._live.values()):
            arrival.interrupt(failure)

    def remove(self, arrival_id: int) -> None:
        self._live.pop(arrival_id, None)
        if not self._live:
            self._idle.set()

    def oldest(self, most: int) -> list[PendingArrival]:
        return list(itertools.islice(self._live.values(), max(most, 0)))

    async def wait_idle(self) -> None:
        """Wait until there are no requests.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()


def rejection_error(command: RejectArrival) -> RequestRefused:
    """Return the client's error for a request that the arrival policy sheds or redirects."""
    if command.base_url:
        base = command.base_url.rstrip("/")
        return RequestRefused(
            f"this server has no room for the request in time; {base} may serve it",
            code="redirected",
            status=REDIRECT,
            location=base,
        )
    return RequestRefused(
        f"{command.reason}.",
        code="shed",
        status=command.status,
        retry_after_s=command.retry_after_s,
    )


STATUS = {
    RefusalCode.QUEUE_FULL: 429,
    RefusalCode.DUPLICATE_ID: 409,
    RefusalCode.GIVEN_UP: 503,
}
"""HTTP status of refusals that are not client errors; client errors have 400."""
RETRY_AFTER_S = {RefusalCode.QUEUE_FULL: 1}


def refusal_error(refuse: Refuse) -> RequestRefused:
    """Return the client's error for a refusal: the problem, the value, the limit, the remedy."""
    code = refuse.code
    return RequestRefused(
        _message(refuse),
        code=code.value,
        status=STATUS.get(code, 400),
        retry_after_s=RETRY_AFTER_S.get(code),
    )


def _message(refuse: Refuse) -> str:
    if refuse.code is RefusalCode.GIVEN_UP:
        return f"{refuse.reason}. Remedy: restart the server."
    if refuse.code is RefusalCode.DUPLICATE_ID:
        return "this request id is in use. Remedy: choose another, or none."
    what, value, limit, remedy = _words(refuse)
    return limit_message(what, value=value, limit=limit, remedy=remedy)


def _words(refuse: Refuse) -> tuple[str, object, object, str]:
    value, setting, detail = refuse.value, refuse.setting, refuse.detail
    tokens = f"{refuse.limit} tokens"
    match refuse.code:
        case RefusalCode.EMPTY:
            return (
                "the prompt and max_tokens must not be empty",
                f"{value} prompt tokens, max_tokens {detail[0]}",
                f"at least {refuse.limit} each",
                "send a prompt and ask for a token",
            )
        case RefusalCode.BAD_ITEMS:
            return (
                "items overlap, hold no tokens, or lie outside the prompt",
                list(zip(detail[::2], detail[1::2], strict=True)),
                f"spans in order within 0 to {refuse.limit}",
                "place each item on its own placeholders",
            )
        case RefusalCode.CONTEXT_EXCEEDED:
            what = "prompt plus max_tokens exceeds the context"
            return what, value, tokens, "shorten the prompt or lower max_tokens"
        case RefusalCode.KV_EXCEEDED:
            what = "prompt plus max_tokens can never fit the KV cache"
            remedy = f"lower max_tokens, or give the server a larger KV cache ({setting})"
            return what, value, tokens, remedy
        case RefusalCode.IMAGE_EXCEEDS_CACHE:
            what = "an image can never fit the embedding cache"
            return what, value, tokens, f"send a smaller image, or raise {setting}"
        case RefusalCode.IMAGES_EXCEED_CACHE:
            return (
                "the images of a request can never fit the embedding cache together",
                f"{value} tokens, each image in whole pages of {detail[0]}",
                tokens,
                f"send fewer images, or raise {setting}",
            )
        case RefusalCode.CHUNK_EXCEEDED:
            what = "positions of this model see later ones, so one step must hold them together"
            return what, f"{value} tokens", tokens, f"send less at once, or raise {setting}"
        case _:
            bytes_wait = setting == "generate.max_waiting_bytes"
            what = (
                "the requests that wait hold too many bytes"
                if bytes_wait
                else "too many requests wait"
            )
            return what, value, refuse.limit, f"try again later, or raise {setting}"
