"""Requests of an engine: checks of their parameters, common to HTTP clients and library users, and preparation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, cast

import msgspec

from vsched.aio.adapters import AdapterTable
from vsched.aio.grammar_checks import GrammarChecks
from vsched.aio.launcher import Launcher
from vsched.aio.shell import Shell
from vsched.errors import RequestRefused
from vsched.kernel import SchedulerLimits
from vsched.kernel.events import FurtherChoice
from vsched.media import ImageReference, Prompt
from vsched.media.pipeline import MediaPipeline, PreparedRequest
from vsched.plain_values import InvalidValue, field_types, plain_value
from vsched.transport.arena import Arena
from vsched.types import Request, SamplingParams
from vsched.worker.slots import STOP_TOKENS_MAX


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
    """Return the parameters for a prompt of `tokens` with `max_tokens` 0 replaced by the remaining context."""
    if sampling.prompt_only:
        return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
    if sampling.max_tokens:
        return sampling
    room = min(limits.context_tokens, limits.blocks * limits.block_size) - tokens
    return msgspec.structs.replace(sampling, max_tokens=max(room, 1))


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
            raise RequestRefused.at_limit(
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
        raise RequestRefused.at_limit(
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
        raise RequestRefused.at_limit(
            "too many log-probabilities of the prompt, its tokens times one and the alternatives of each",
            value=count,
            limit=limit,
            remedy="ask for fewer alternatives, send a shorter prompt, or raise server.prompt_logprobs_max",
            code="too_many_logprobs",
        )


def prompts_untold() -> RequestRefused:
    """Return the error for workers that do not compute prompt log-probabilities."""
    return RequestRefused(
        "log-probabilities of prompt tokens are not available: the worker plug-in of this model cannot tell them. "
        "Remedy: send neither prompt_logprobs nor echo with logprobs.",
        code="unsupported_parameter",
    )


def _within(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also when it is not a number
        raise RequestRefused.at_limit(
            f"{what} is out of bounds",
            value=value,
            limit=f"{low} to {high}",
            remedy="send a value within the limit",
            code="invalid_value",
        )
