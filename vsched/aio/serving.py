"""The parts of a running engine, and the submission of prepared requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from vsched.aio.adapters.table import AdapterHold, AdapterTable, with_adapter
from vsched.aio.answers import LastEnd, further_choices
from vsched.aio.draft_checks import check_vocabulary
from vsched.aio.grammar_checks import GrammarChecks
from vsched.aio.pending_arrivals import PendingArrival
from vsched.aio.replicas.launcher import Launcher
from vsched.aio.request_bounds import (
    check_numbers,
    check_prompt_values,
    check_stop_tokens,
    prompts_untold,
)
from vsched.aio.shell import Shell
from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.sink import Answering, AnswerSink, interrupt_all
from vsched.aio.streams.stream import StopScope, TokenStream
from vsched.aio.streams.timing import RequestTimeline, timeline_of
from vsched.media import ImageReference, Prompt
from vsched.media.pipeline import MediaPipeline, PreparedRequest
from vsched.record.left import PartialOutput
from vsched.transport.arena import Arena
from vsched.types import ModelInfo, Request, SamplingParams
from vsched.worker.capabilities import TellsPrompts
from vsched.worker.contract import Detokenizer, Preprocessor, WorkerPlugin

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
    make_answer: Callable[[Answering], Sink],
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
    request = with_adapter(msgspec.structs.replace(request, sampling=sampling), hold)
    release = LastEnd(len(request_ids), give_back)

    def answer(request_id: str) -> Sink:
        def on_end() -> None:
            release()
            on_timeline(timeline_of(made, preprocess_ms))

        made = make_answer(
            Answering(
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


def token_stream(
    make_detokenizer: Callable[..., Detokenizer],
    answering: Answering,
    *,
    make_stop_scope: Callable[[], StopScope] | None = None,
) -> TokenStream:
    """Return the stream that converts the tokens of a choice to text."""
    sampling = answering.sampling
    stop_scope = make_stop_scope() if make_stop_scope is not None and sampling.stop else None
    return TokenStream(
        answering.request_id,
        prompt_token_ids=answering.prompt_token_ids,
        detokenizer=make_detokenizer(special=sampling.show_special),
        stop=sampling.stop,
        stop_token_ids=answering.stop_token_ids,
        include_stop=sampling.include_stop,
        min_tokens=sampling.min_tokens,
        stop_scope=stop_scope,
        logprobs=sampling.logprobs is not None,
        on_stop=answering.on_stop,
        on_end=answering.on_end,
        prompt_report=answering.report,
        prompt_only=sampling.prompt_only,
    )


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
    tells = isinstance(plugin, TellsPrompts) and plugin.tells_prompts(info, ranks=ranks)
    preprocessor = plugin.load_preprocessor(info)
    if info.draft is not None:
        check_vocabulary(info, preprocessor, plugin.load_preprocessor(info.draft))
    return preprocessor, tells
