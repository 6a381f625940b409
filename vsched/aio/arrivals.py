"""Requests between their arrival and their submission to the kernel: checks of their parameters, and refusals.

The checks are common to HTTP clients and library users. Requests wait for the decision of the arrival policy, or their
images and prompts are being prepared. Until its tokens are known, a request belongs to no group, and the task that
prepares it is its only state. So it is counted and interrupted here, with the same error that a request waiting in the
kernel gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Annotated, Any, cast

import msgspec

from vsched.errors import RequestRefused, VschedError, limit_message
from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import AdmitArrival, RefusalCode, Refuse, RejectArrival
from vsched.kernel.events import Arrived, Event, FurtherChoice, Withdrawn
from vsched.media import ImageReference, Prompt
from vsched.plain_values import InvalidValue, field_types, plain_value
from vsched.types import Request, SamplingParams
from vsched.worker.slots import STOP_TOKENS_MAX

REDIRECT = 307
"""HTTP status of a redirect that keeps method and body."""


class PendingArrival:
    """A request that is not submitted yet; see `PendingArrivals.track_arrival`.

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
    def track_arrival(self, request_id: str) -> Iterator[PendingArrival]:
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
            what = "the prompt leaves no room in the context"
            return what, f"{value} tokens with output", tokens, "shorten the prompt"
        case RefusalCode.KV_EXCEEDED:
            what = "the prompt can never fit the KV cache"
            remedy = f"shorten it, or give the server a larger KV cache ({setting})"
            return what, f"{value} tokens with output", tokens, remedy
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


_SEED_BITS = 63


def further_choices(request_ids: Sequence[str], seed: int) -> tuple[FurtherChoice, ...]:
    """Return the choices after the first, which has the request's seed, so it equals a single choice."""
    found = []
    for index, request_id in enumerate(request_ids[1:], 1):
        digest = blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"vsched.seed").digest()
        own = int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
        found.append(FurtherChoice(request_id, own))
    return tuple(found)


def final_length(sampling: SamplingParams, limits: SchedulerLimits, tokens: int) -> SamplingParams:
    """Return the parameters for a prompt of `tokens`, with `max_tokens` limited to the remaining context."""
    if sampling.prompt_only:
        return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
    outputs_max = limits.outputs_max(tokens, sampling.max_tokens)
    if outputs_max == sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=outputs_max)


_INT32_MAX = 2**31 - 1
_SEED_MAX = 2**63 - 1
_WORD_TOKENS_MAX = 1024
RequestIds = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


def checked_argument(name: str, value: object, wanted: Any) -> Any:
    """Convert an argument of a library call to the declared type; see `plain_value`.

    Raises:
        RequestRefused: When it has the wrong type.
    """
    try:
        return plain_value(value, wanted, path=name)
    except InvalidValue as error:
        message = error.message(f"pass {error.path} as this type")
        raise RequestRefused(message, code="invalid_value") from None


def checked_prompt(prompt: object) -> Prompt:
    """Check the prompt of a library call: text, token ids, or a function that renders the text.

    A subclass of `str` is kept: a rendered prompt marks the client's text, in which special tokens are plain text.
    Prompt texts are not recorded.

    Raises:
        RequestRefused: When it has another type, or is text that UTF-8 cannot encode.
    """
    if isinstance(prompt, str):
        checked_argument("prompt", prompt, str)
        return prompt
    if callable(prompt):
        return prompt
    try:
        return plain_value(prompt, list[int], path="prompt")  # type: ignore[no-any-return]
    except InvalidValue as error:
        expected = f"a text or a list of token ids ({error.expected})"
        message = InvalidValue("prompt", prompt, expected).message(
            "pass one of them; of several prompts, a list of them"
        )
        raise RequestRefused(message, code="invalid_value") from None


def checked_images(images: object) -> list[ImageReference]:
    """Check the images of a library call and return them as a list.

    Raises:
        RequestRefused: When an image is not an image reference, or a single image was passed instead of a list.
    """
    is_list = isinstance(images, Iterable) and not isinstance(images, str | bytes)
    listed = list(cast("Iterable[object]", images)) if is_list else [images]
    for index, image in enumerate(listed):
        if not is_list or not isinstance(image, ImageReference):
            raise RequestRefused.of_limit(
                f"images[{index}] is not valid",
                value=f"{image!r:.200}",
                limit="a list of URLs, as str, or of MediaReference",
                remedy="pass images as such a list",
                code="invalid_value",
            )
    return cast("list[ImageReference]", listed)


def request_of(request_id: str, fields: dict[str, Any]) -> Request:
    """Build a request, without its prompt tokens, from the arguments of a library call.

    Raises:
        RequestRefused: When an argument has the wrong type.
    """
    wanted = field_types(Request)
    checked = {name: checked_argument(name, value, wanted[name]) for name, value in fields.items()}
    return Request(request_id=request_id, prompt_token_ids=[], **checked)


def check_numbers(token_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int) -> None:
    """Check token ids and sampling parameters against the limits of the wire format and the model.

    Raises:
        RequestRefused: With the value and the limit.
    """
    if token_ids:
        _within("a token id of the prompt", min(token_ids), 0, vocab_size - 1)
        _within("a token id of the prompt", max(token_ids), 0, vocab_size - 1)
    for stop in sampling.stop:
        _within("the length of a stop string", len(stop), 1, _INT32_MAX)
    for token_id in sampling.stop_token_ids:
        _within("a stop token id", token_id, 0, vocab_size - 1)
    for token_id, bias in sampling.logit_bias:
        _within("a token id of logit_bias", token_id, 0, vocab_size - 1)
        _within("logit_bias", bias, -1e6, 1e6)
    for word in sampling.bad_words:
        _within("the number of tokens of a bad word", len(word), 1, _WORD_TOKENS_MAX)
        for token_id in word:
            _within("a token id of bad_words", token_id, 0, vocab_size - 1)
    _within("max_tokens", sampling.max_tokens, 0, _INT32_MAX)
    _within("min_tokens", sampling.min_tokens, 0, _INT32_MAX)
    _within("top_k", sampling.top_k, -1, _INT32_MAX)
    _within("seed", sampling.seed or 0, -_SEED_MAX - 1, _SEED_MAX)
    _within("logprobs", sampling.logprobs or 0, 0, vocab_size)
    _within("prompt_logprobs", sampling.prompt_logprobs or 0, 0, vocab_size)
    _within("temperature", sampling.temperature, 0, 1e6)
    _within("top_p", sampling.top_p, 0, 1)
    _within("min_p", sampling.min_p, 0, 1)
    _within("repetition_penalty", sampling.repetition_penalty, 1e-3, 1e3)
    _within("presence_penalty", sampling.presence_penalty, -1e6, 1e6)
    _within("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6)


def check_stop_tokens(requested: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
    """Return the stop tokens of a request and of the checkpoint, sorted.

    Raises:
        RequestRefused: When there are too many.
    """
    stops = tuple(sorted({*requested, *own}))
    if len(stops) > STOP_TOKENS_MAX:
        raise RequestRefused.of_limit(
            "too many stop tokens, the checkpoint's own included",
            value=len(stops),
            limit=STOP_TOKENS_MAX,
            remedy="send fewer stop_token_ids",
            code="too_many_stop_tokens",
        )
    return stops


def check_prompt_values(count: int, limit: int) -> None:
    """Check the number of requested prompt log-probabilities: one per token, plus its alternatives.

    Raises:
        RequestRefused: When there are too many to keep and send.
    """
    if count > limit:
        raise RequestRefused.of_limit(
            "too many log-probabilities of prompts (tokens times one and the alternatives of each, for each choice)",
            value=count,
            limit=limit,
            remedy="ask for fewer alternatives or choices, send less, or raise server.prompt_logprobs_max",
            code="too_many_logprobs",
        )


def prompt_logprobs_unavailable() -> RequestRefused:
    """Return the error for workers that do not compute prompt log-probabilities."""
    return RequestRefused(
        "log-probabilities of prompt tokens are not available: the worker plug-in of this model does not compute them. "
        "Remedy: send neither prompt_logprobs nor echo with logprobs.",
        code="unsupported_parameter",
    )


def _within(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also when it is not a number
        raise RequestRefused.of_limit(
            f"{what} is out of bounds",
            value=value,
            limit=f"{low} to {high}",
            remedy="send a value within the limit",
            code="invalid_value",
        )
