"""Requests of an engine: checks of their parameters, common to HTTP clients and library users, and submission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, TypeVar, cast

import msgspec

from vsched.aio.adapters import AdapterHold, AdapterTable, with_adapter
from vsched.aio.draft_checks import check_vocabulary
from vsched.aio.grammar_checks import GrammarChecks
from vsched.aio.pending_arrivals import PendingArrival
from vsched.aio.replicas.launcher import Launcher
from vsched.aio.shell import Shell
from vsched.aio.streams.stream import ChoiceInputs, PromptReport
from vsched.aio.streams.table import AnswerSink, RequestTimeline, interrupt_all, timeline_of
from vsched.errors import RequestRefused, limit_message
from vsched.kernel.events import FurtherChoice
from vsched.media import ImageReference, Prompt
from vsched.media.pipeline import MediaPipeline, PreparedRequest
from vsched.plain_values import InvalidValue, field_types, plain_value
from vsched.record.journal import PartialOutput
from vsched.transport.arena import Arena
from vsched.types import ModelInfo, Request, SamplingParams
from vsched.worker.contract import Preprocessor, WorkerPlugin
from vsched.worker.slots import STOP_TOKENS_MAX

FrontEnd = tuple[Preprocessor, bool]
"""The preprocessor of requests, and whether ranks can report the log-probabilities of prompt tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningParts:
    """The parts of an engine between its start and its stop.

    Attributes:
        tells_prompts: Whether ranks can report the log-probabilities of prompt tokens.
    """

    arena: Arena
    launcher: Launcher
    shell: Shell
    media: MediaPipeline
    grammars: GrammarChecks
    tells_prompts: bool
    adapters: AdapterTable

    async def prepare(
        self,
        prompt: Prompt,
        images: Sequence[ImageReference],
        cache_salt: str,
        sampling: SamplingParams,
    ) -> PreparedRequest:
        """Check prompt log-probabilities and grammar of a request, then prepare its prompt and images.

        Raises:
            RequestRefused: When one of these is not acceptable.
        """
        if sampling.prompt_logprobs is not None and not self.tells_prompts:
            raise prompts_untold()
        if sampling.grammar:
            await self.grammars.check(sampling)
        return await self.media.prepare(prompt, images, cache_salt)

    async def stop(self, *, grace_s: float) -> None:
        """End all requests and ranks, then release threads, sockets and memory.

        Blocks: at most the grace period, after which ranks are killed, and until busy threads are done.
        """
        self.adapters.close()
        try:
            await self.shell.stop(grace_s=grace_s)
        finally:
            # In a thread, because it waits for images that are being processed.
            await asyncio.to_thread(self.media.close)
            self.grammars.close()
            self.launcher.close()
            self.arena.close()


Sink = TypeVar("Sink", bound=AnswerSink)


def submit_choices(
    shell: Shell,
    request: Request,
    request_ids: Sequence[str],
    *,
    arrival: PendingArrival,
    info: ModelInfo,
    prompt_logprobs_max: int,
    make_answer: Callable[[ChoiceInputs], Sink],
    hold: AdapterHold | None,
    give_back: Callable[[], None],
    on_timeline: Callable[[RequestTimeline], None],
    preprocess_ms: float,
    started: PartialOutput | None = None,
) -> list[Sink]:
    """Submit a request with a choice for each id, and return the stream of each choice.

    When a choice ends, `on_timeline` gets its timeline. After the last one,
    `give_back` frees their resources. The first choice continues one that was `started`; its stream has all of it.

    Raises:
        RequestRefused: If one of its numbers is out of bounds, or its prompt is not the one that was begun.
    """
    emitted = () if started is None else started.continued(request)
    prompt_token_ids, sampling = request.prompt_token_ids, request.sampling
    all_token_ids = [*prompt_token_ids, *emitted] if emitted else prompt_token_ids
    check_numbers(all_token_ids, sampling, vocab_size=info.vocab_size)
    report = None
    if sampling.prompt_logprobs is not None:
        report = PromptReport(prompt_token_ids, sampling.prompt_logprobs)
        check_prompt_values(report.values, prompt_logprobs_max)
    sampling = _with_length(sampling, shell, prompt_tokens=len(prompt_token_ids))
    own = () if sampling.ignore_eos else info.stop_token_ids
    stop_token_ids = check_stop_tokens(sampling.stop_token_ids, own)
    request = msgspec.structs.replace(request, sampling=sampling)
    if hold is not None:
        request = with_adapter(request, hold)
    release = LastEnd(len(request_ids), give_back)

    def answer(request_id: str) -> Sink:
        def on_end() -> None:
            release()
            on_timeline(timeline_of(made, preprocess_ms))

        made = make_answer(
            ChoiceInputs(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                stop_token_ids=frozenset(stop_token_ids),
                report=report,
                on_stop=shell.end,
                on_end=on_end,
            )
        )
        return made

    generations = [answer(request_id) for request_id in request_ids]
    if hold is not None:
        hold.run(partial(interrupt_all, generations))
    further = further_choices(request_ids, sampling.seed or 0)
    with_streams = dict(zip(further, generations[1:], strict=True))
    shell.submit(
        request,
        stop_token_ids,
        generations[0],
        with_streams,
        arrival=arrival,
        emitted=emitted,
    )
    for token_id in emitted:  # after acceptance: a stop string among them ends the choice
        generations[0].push(token_id, None)
    return generations


def _with_length(sampling: SamplingParams, shell: Shell, *, prompt_tokens: int) -> SamplingParams:
    """Return the parameters with `max_tokens` 0 replaced by the remaining context."""
    if sampling.prompt_only:
        return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
    if sampling.max_tokens:
        return sampling
    limits = shell.limits
    room = min(limits.context_tokens, limits.blocks * limits.block_size) - prompt_tokens
    return msgspec.structs.replace(sampling, max_tokens=max(room, 1))


def load_front_end(plugin: WorkerPlugin, info: ModelInfo, *, ranks: int) -> FrontEnd:
    """Load the preprocessor, and ask the plug-in whether `ranks` ranks can report prompt log-probabilities."""
    tells = plugin.computes_prompt_logprobs(info, ranks=ranks)
    preprocessor = plugin.load_preprocessor(info)
    if info.draft is not None:
        check_vocabulary(info, preprocessor, plugin.load_preprocessor(info.draft))
    return preprocessor, tells


_SEED_BITS = 63


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a further choice; the first has the request's seed, so it equals a single choice."""
    text = f"{seed}/{index}".encode()
    digest = blake2b(text, digest_size=8, person=b"vsched.seed").digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def further_choices(request_ids: Sequence[str], seed: int) -> tuple[FurtherChoice, ...]:
    """Return the choices after the first of a request whose choices have these ids."""
    return tuple(
        FurtherChoice(request_id, answer_seed(seed, index))
        for index, request_id in enumerate(request_ids)
        if index
    )


class LastEnd:
    """Calls `release` when the last of `count` choices has ended."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release

    def __call__(self) -> None:
        """Note the end of a choice."""
        self._left -= 1
        if not self._left:
            self._release()


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
    return checked_argument("prompt", prompt, list[int])  # type: ignore[no-any-return]


def checked_images(images: object) -> list[ImageReference]:
    """Check the images of a library call and return them as a list.

    Raises:
        RequestRefused: When an image is not an image reference, or a single image was passed instead of a list.
    """
    is_list = isinstance(images, Iterable) and not isinstance(images, str | bytes)
    listed = list(cast("Iterable[object]", images)) if is_list else [images]
    for index, image in enumerate(listed):
        if not is_list or not isinstance(image, ImageReference):
            message = limit_message(
                f"images[{index}] is not valid",
                value=f"{image!r:.200}",
                limit="a list of URLs, as str, or of NamedImage, BoundedImage, VideoReference, "
                "EmbeddedImage or EmbeddedVideo",
                remedy="pass images as such a list",
            )
            raise RequestRefused(message, code="invalid_value")
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
        message = limit_message(
            "too many stop tokens, the checkpoint's own included",
            value=len(stops),
            limit=STOP_TOKENS_MAX,
            remedy="send fewer stop_token_ids",
        )
        raise RequestRefused(message, code="too_many_stop_tokens")
    return stops


def check_prompt_values(count: int, limit: int) -> None:
    """Check the number of requested prompt log-probabilities: one per token, plus its alternatives.

    Raises:
        RequestRefused: When there are too many to keep and send.
    """
    if count > limit:
        message = limit_message(
            "too many log-probabilities of the prompt, its tokens times one and the alternatives of each",
            value=count,
            limit=limit,
            remedy="ask for fewer alternatives, send a shorter prompt, or raise server.prompt_logprobs_max",
        )
        raise RequestRefused(message, code="too_many_logprobs")


def prompts_untold() -> RequestRefused:
    """Return the error for workers that do not compute prompt log-probabilities."""
    return RequestRefused(
        "log-probabilities of prompt tokens are not available: the worker plug-in of this model cannot tell them. "
        "Remedy: send neither prompt_logprobs nor echo with logprobs.",
        code="unsupported_parameter",
    )


def _within(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also when it is not a number
        message = limit_message(
            f"{what} is out of bounds",
            value=value,
            limit=f"{low} to {high}",
            remedy="send a value within the limit",
        )
        raise RequestRefused(message, code="invalid_value")
