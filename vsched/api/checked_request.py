"""A checked request, which endpoints make of a body, and formatters and traces read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vsched.aio.streams import StopScope
from vsched.api.tools.reader import MessageBuilder
from vsched.media import ImageReference, Prompt
from vsched.types import SamplingParams


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the contents of a response besides text.

    Attributes:
        usage: A last event has the usage; with `running_usage` each event has the usage so far.
        token_ids: Token ids of the prompt and of each choice are included.
        tokens_as_ids: Log-probabilities name tokens as `token_id:N`, which also works for tokens that are not valid
            text.
        shows_special: Special tokens are included in the text.
        prompt_logprobs: Number of alternatives per prompt token, in vLLM's format; None for no prompt
            log-probabilities.
        echo: The text of a completion starts with its prompt, and its log-probabilities with those of the prompt, with
            `echo_logprobs` alternatives per token.
    """

    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    shows_special: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    echo_logprobs: int = 0


class CheckedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready for the engine.

    `drawn` choices are generated for each prompt, and the best `n` of them are returned. `hides_logprobs` means that
    log-probabilities are needed only for that selection. `echoes` are the texts of prompts, or of a chat's last
    message, to repeat in the response; None for a prompt of token ids. `constrained_by` is the parameter that the
    grammar comes from. `message_builder` creates the parser of a choice with tool calls or reasoning, `make_stop_scope`
    the scope that excludes tool calls from stop strings. `original` are the request fields that another vendor's API
    repeats in its response. `model` is the name in the response, and `adapter` is the same name if it is an adapter,
    otherwise empty.
    """

    prompts: Sequence[Prompt]
    images: Sequence[ImageReference]
    sampling: SamplingParams
    request_id: str
    created: int
    model: str
    adapter: str
    priority: int
    ttft_target_ms: int | None
    cache_salt: str
    session: str
    stream: bool
    options: ResponseOptions
    constrained_by: str
    n: int = 1
    drawn: int = 1
    hides_logprobs: bool = False
    echoes: tuple[str | None, ...] = ()
    message_builder: Callable[[int], MessageBuilder] | None = None
    make_stop_scope: Callable[[], StopScope] | None = None
    original: object = None

    def builder_of(self, index: int) -> MessageBuilder | None:
        """Parser of a choice; None without tool calls and reasoning."""
        return None if self.message_builder is None else self.message_builder(index)
