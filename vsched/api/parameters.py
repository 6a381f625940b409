"""Convert decoded bodies to engine parameters, and check the limits that depend on settings or the model."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar, cast, get_args

import msgspec

from vsched.api.checked_request import ResponseOptions
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused, check_count, out_of_bounds, shown
from vsched.api.request_schema import (
    ChatRequest,
    CompletionRequest,
    ReasoningEffort,
    SamplingFields,
    StreamOptions,
    TextPart,
    TokenizeRequest,
)
from vsched.api.unsupported import find_unsupported_type
from vsched.plain_values import shared_decoder
from vsched.types import ModelInfo, SamplingParams
from vsched.worker.contract import Preprocessor

Body = TypeVar("Body")

_SESSION_CHARACTERS_MAX = 64
_CACHE_SALT_CHARACTERS_MAX = 256
_STOP_MAX = 16
_WORD_CHARACTERS_MAX = 256
"""Maximum characters of a stop string, and of a forbidden word."""
_LOGIT_BIAS_MAX = 1024
_BAD_WORDS_MAX = 64
_COMMON_ARGUMENTS = frozenset({"add_vision_id", "enable_thinking", "reasoning_effort", "thinking"})
"""Names in `chat_template_kwargs` that clients send to all models, whether the template reads them or not."""
_MESSAGE_CHARACTERS_MAX = 300
_FIELD = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"(\w+|(?<=\[)\.\.\.)|\[(\d+)\]")
_BOUND = re.compile(r"Expected `(?:float|int)` (?P<limit>[<>]=? \S+)$")
_PART_KIND = re.compile(r"(?:content|output|summary)\[\d+\]\.type$")
_KINDS = re.compile(r"Expected `(?P<kinds>[^`]*)`, got `(?P<sent>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`$")
_KIND_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_ROLES = "system, developer, user, assistant, tool or function"
_PARTS = "text, image_url, video_url, video, image_embeds, video_embeds, refusal or thinking"
_TOKEN_DIGITS_MAX = 10
_COMPLETION_TOKENS = 16
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]{1,64})")


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Decode and validate a body.

    Raises:
        ParameterRefused: If it is not JSON or does not match the type; names the parameter.
    """
    decoder = shared_decoder(kind)  # a large body is decoded in a thread
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeError):
        message = "the body is not valid JSON. Remedy: send one JSON object in UTF-8."
        raise ParameterRefused(message, param=None, code="invalid_json") from None
    except RecursionError:
        message = "the body is nested too deeply. Remedy: send a flat request."
        raise ParameterRefused(message, param=None, code="invalid_json") from None


def _invalid(text: str, body: bytes, kind: type) -> ParameterRefused:
    """Convert a msgspec error to a readable one: the parameter, its value, the allowed values and a remedy."""
    unknown = _UNKNOWN.match(text)
    if unknown is not None:
        name = unknown["name"]
        message = f"`{name}` is not a known parameter. Remedy: check its spelling or leave it out."
        return ParameterRefused(message, param=name, code="unknown_parameter")
    found = _FIELD.search(text)
    path = found["path"] if found is not None else ""
    text = text[: found.start()] if found is not None else text
    steps = _STEP.findall(path)
    values = _values(body, steps)
    # It takes precedence over errors of its fields.
    refusal = find_unsupported_type(values, served=getattr(kind, "SERVED", ()))
    if refusal is not None:
        return refusal
    missing = _MISSING.match(text)
    if missing is not None:
        path = f"{path}.{missing['name']}".removeprefix(".")
        return ParameterRefused(f"`{path}` is missing. Remedy: send it.", param=path)
    name = f"`{path}`" if path else "the body"
    bound, kinds = _BOUND.match(text), _KINDS.match(text)
    if path.endswith("].role"):
        what, limit = "is no role", getattr(kind, "ROLES", _ROLES)
        remedy = "send one of these"
    elif path.endswith("effort"):
        what, limit = "is no effort", ", ".join(get_args(ReasoningEffort))
        remedy = "send one of these"
    elif _PART_KIND.search(path) is not None:
        what, limit = "is no kind of content part", getattr(kind, "PARTS", _PARTS)
        remedy = "send one of these"
    elif bound is not None:
        what, limit, remedy = "is out of bounds", bound["limit"], "send a value within the limit"
    elif kinds is not None:
        kept = kinds["kinds"].removesuffix(" | null").split(" | ")  # clients want a value, not null
        words = [_KIND_WORDS.get(each, each) for each in kept]
        limit = " or ".join(words)
        what, remedy = "is of the wrong type", f"send {limit}"
        if kinds["sent"] == "float" and "an integer" in words:
            remedy += ", which has no decimal point"
    elif text == "Number out of range":
        what, limit, remedy = "is out of bounds", "64 bits", "send a smaller number"
    else:
        what, limit, remedy = "is not valid", text[:_MESSAGE_CHARACTERS_MAX], "correct it"
    # msgspec does not report keys of dictionaries, and it skips invalid JSON.
    value = shown(values[-1][1]) if len(values) > len(steps) else "(not shown)"
    return ParameterRefused.of_limit(
        f"{name} {what}", value=value, limit=limit, remedy=remedy, param=path or None
    )


def _values(body: bytes, steps: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Path and value of the root and each step, as far as they are found.

    The body is decoded again, only for clients that send invalid ones.
    """
    found: list[tuple[str, Any]] = []
    errors = (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError)
    with contextlib.suppress(*errors):
        where, value = "", msgspec.json.decode(body)
        found.append((where, value))
        for name, index in steps:
            value = value[int(index)] if index else value[name]
            where += f"[{index}]" if index else f".{name}" if where else name
            found.append((where, value))
    return found


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    info: ModelInfo,
    settings: ApiSettings,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    echo: bool = False,
) -> SamplingParams:
    """Build the engine's sampling parameters.

    A missing `max_tokens` becomes 0, which the engine takes as "to the end of the context", where larger ones end, too;
    0 means that nothing is generated. A missing seed is drawn at random; other missing values come from the checkpoint.
    With `echo`, the log-probabilities of the prompt are reported like those of the output.

    Raises:
        ParameterRefused: If one is out of bounds.
    """
    if max_tokens is not None:
        max_tokens = min(max_tokens, info.context_tokens)
    min_tokens_limit = info.context_tokens if max_tokens is None else max_tokens
    if request.min_tokens > min_tokens_limit:
        raise out_of_bounds(
            "min_tokens",
            value=request.min_tokens,
            limit=f"{min_tokens_limit} (max_tokens)",
            remedy="ask for fewer tokens",
        )
    prompt_logprobs = alternatives("prompt_logprobs", request.prompt_logprobs, info, settings)
    if echo and logprobs is not None:
        prompt_logprobs = max(
            prompt_logprobs or 0, alternatives("logprobs", logprobs, info, settings) or 0
        )
    logprobs = alternatives("logprobs", logprobs, info, settings)

    check_vocabulary("stop_token_ids", request.stop_token_ids or (), info)

    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    own = info.sampling
    top_k = own.top_k if request.top_k is None else request.top_k
    seed = secrets.randbits(63) if request.seed is None else request.seed & (2**63 - 1)
    return SamplingParams(
        max_tokens=max_tokens or 0,
        min_tokens=request.min_tokens,
        temperature=given(request.temperature, own.temperature),
        top_p=given(request.top_p, own.top_p),
        top_k=max(top_k, 0),
        min_p=given(request.min_p, own.min_p),
        seed=seed,
        repetition_penalty=given(request.repetition_penalty, own.repetition_penalty),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        stop=_stop(request.stop),
        # The engine limits them, with the checkpoint's own.
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        include_stop=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        show_special=request.skip_special_tokens is False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_only=max_tokens == 0,
        logit_bias=_logit_bias(request.logit_bias, info),
        bad_words=bad_words,
        grammar=grammar,
    )


def alternatives(
    param: str, count: int | None, info: ModelInfo, settings: ApiSettings
) -> int | None:
    """Number of alternatives requested per token; -1 means the whole vocabulary.

    Raises:
        ParameterRefused: If there are too many.
    """
    count = info.vocab_size if count == -1 else count
    if count is not None and count > settings.logprobs_max:
        raise out_of_bounds(
            param,
            value=count,
            limit=settings.logprobs_max,
            remedy="ask for fewer or raise server.logprobs_max",
        )
    return count


def check_stream(request: SamplingFields) -> None:
    """Reject stream options without a stream, and options that streams do not support.

    Raises:
        ParameterRefused: With the name of the parameter.
    """
    if not request.stream:
        if request.stream_options is None:
            return
        message = "`stream_options` needs a stream. Remedy: send stream = true, or leave it out."
        raise ParameterRefused(message, param="stream_options")
    if request.prompt_logprobs is not None:
        message = "`prompt_logprobs` are not available in streams. Remedy: send stream = false."
        raise ParameterRefused(message, param="prompt_logprobs")


def _logit_bias(biases: dict[str, float] | None, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    biases = biases or {}
    check_count("logit_bias", len(biases), _LOGIT_BIAS_MAX, "tokens")
    for name in biases:
        if not (name.isascii() and name.isdecimal() and len(name) <= _TOKEN_DIGITS_MAX):
            raise out_of_bounds(
                "logit_bias",
                value=f"the key {shown(name)}",
                limit=f"token ids from 0 to {info.vocab_size - 1}",
                remedy="send token ids of this model as keys",
            )
    pairs = tuple((int(name), float(bias)) for name, bias in biases.items())
    check_vocabulary("logit_bias", [token for token, _ in pairs], info)
    return pairs


def bad_words(request: SamplingFields, preprocessor: Preprocessor) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the forbidden words: at the start of a text, and after a space.

    Raises:
        ParameterRefused: If they are too many or too long.
    """
    words = request.bad_words or []
    check_count("bad_words", len(words), _BAD_WORDS_MAX, "words")
    found: list[tuple[int, ...]] = []
    for word in words:
        _check_length("bad_words", word, "a word")
        texts = (word.lstrip() or word, " " + word.lstrip())
        found += (tuple(preprocessor.tokenize(text, images=False)) for text in texts)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def _check_length(param: str, text: str, what: str) -> None:
    if not 0 < len(text) <= _WORD_CHARACTERS_MAX:
        raise out_of_bounds(
            param,
            value=f"{len(text)} characters",
            limit=f"1 to {_WORD_CHARACTERS_MAX} characters",
            remedy=f"send {what} of that length",
        )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    check_count("stop", len(strings), _STOP_MAX, "strings")
    for text in strings:
        _check_length("stop", text, "a stop string")
    return tuple(strings)


def check_vocabulary(param: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    """Reject token ids outside the vocabulary.

    Raises:
        ParameterRefused: With the largest one.
    """
    if token_ids and max(token_ids) >= info.vocab_size:
        raise ParameterRefused.of_limit(
            f"a token id of `{param}` is out of vocabulary",
            value=max(token_ids),
            limit=f"below {info.vocab_size}, the size of the vocabulary",
            remedy="send token ids of this model",
            param=param,
        )


def session_of(request: SamplingFields) -> str:
    """Client-defined name of the conversation; empty if there is none."""
    key = getattr(request, "prompt_cache_key", None)
    return key[:_SESSION_CHARACTERS_MAX] if isinstance(key, str) else ""


def check_cache_salt(request: SamplingFields) -> str:
    """Cache salt of a request.

    Raises:
        ParameterRefused: If it is too long.
    """
    salt = request.cache_salt or ""
    check_count("cache_salt", len(salt), _CACHE_SALT_CHARACTERS_MAX, "characters")
    return salt


def chat_logprobs(request: ChatRequest) -> int | None:
    """Number of alternatives that a chat request asks for; None if it asks for no log-probabilities.

    Raises:
        ParameterRefused: If `top_logprobs` is sent without `logprobs`.
    """
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise ParameterRefused(
            "`top_logprobs` needs `logprobs`. Remedy: send logprobs = true.", param="top_logprobs"
        )
    return None


def echoed_message(request: ChatRequest) -> str:
    """Text of a final assistant message, to repeat at the start of the response; empty if there is none."""
    last = request.messages[-1]
    if last.role != "assistant":
        return ""
    if isinstance(last.content, list):
        return "".join(part.text for part in last.content if isinstance(part, TextPart))
    return last.content or ""


def completion_prompts(request: CompletionRequest, info: ModelInfo) -> list[str | list[int]]:
    """Prompts of a completion request.

    Raises:
        ParameterRefused: If there are none, one is an empty list, or tokens and texts are mixed.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        token_ids = cast("list[int]", prompt)
        check_vocabulary("prompt", token_ids, info)
        return [token_ids]
    if len(kinds) != 1 or not all(isinstance(one, str) or one for one in prompt):
        raise out_of_bounds(
            "prompt",
            value=f"a list of {len(prompt)}" + (" with an empty one" if [] in prompt else ""),
            limit="a text, token ids, a list of texts, or a list of lists of token ids",
            remedy="send all prompts in one of these forms, none of them an empty list",
        )
    prompts = cast("list[str | list[int]]", prompt)
    for one in prompts:
        if not isinstance(one, str):
            check_vocabulary("prompt", one, info)
    return prompts


def completion_tokens(request: CompletionRequest, info: ModelInfo) -> int:
    """`max_tokens` of a text completion; by default OpenAI's 16, or `min_tokens` if that is larger."""
    if request.max_tokens is not None:
        return request.max_tokens
    return min(max(_COMPLETION_TOKENS, request.min_tokens), info.context_tokens)


def choice_count(
    request: SamplingFields, settings: ApiSettings, *, prompts: int = 1, best_of: int | None = None
) -> tuple[int, int]:
    """Number of choices to return for each prompt, and number to generate.

    Raises:
        ParameterRefused: If too many are generated, or fewer than are returned.
    """
    wanted = request.n or 1
    drawn = best_of or wanted
    if drawn < wanted:
        raise out_of_bounds("best_of", value=best_of, limit=f">= {wanted} (n)", remedy="send more")
    if drawn > wanted and request.stream:
        message = "`best_of` above n is not available in streams. Remedy: send stream = false, or best_of = n."
        raise ParameterRefused(message, param="best_of")
    if prompts * drawn > settings.choices_max:
        param = "best_of" if drawn > wanted else "n" if wanted > 1 else "prompt"
        raise out_of_bounds(
            param,
            value=f"{prompts} prompts, {drawn} answers each",
            limit=f"{settings.choices_max} answers",
            remedy="ask for fewer at once or raise server.choices_max",
        )
    return wanted, drawn


def response_options(
    request: SamplingFields,
    sampling: SamplingParams,
    *,
    echo: bool = False,
    usage_always: bool = False,
) -> ResponseOptions:
    """Options for the contents of the response besides text."""
    prompt_logprobs = request.prompt_logprobs
    stream = request.stream_options or StreamOptions()
    usage = bool(request.stream) and (usage_always or stream.include_usage)
    return ResponseOptions(
        usage=usage,
        running_usage=usage and (usage_always or stream.continuous_usage_stats),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        shows_special=sampling.show_special,
        prompt_logprobs=sampling.prompt_logprobs if prompt_logprobs == -1 else prompt_logprobs,
        echo=echo,
        echo_logprobs=sampling.logprobs or 0,
    )


def template_arguments(
    request: ChatRequest | TokenizeRequest, preprocessor: Preprocessor
) -> dict[str, Any]:
    """Arguments of a request for the chat template: its own, its reasoning effort, and the ending of the prompt.

    Raises:
        ParameterRefused: If the template has no such variable, or two endings are requested.
    """
    arguments: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if not arguments.keys() <= _COMMON_ARGUMENTS:
        known = preprocessor.template_variables | _COMMON_ARGUMENTS
        if unknown := sorted(arguments.keys() - known):
            raise out_of_bounds(
                "chat_template_kwargs",
                value=shown(unknown[0]),
                limit=", ".join(sorted(known)),
                remedy="leave it out",
            )
    if isinstance(request, ChatRequest) and (effort := request.reasoning_effort) is not None:
        thinks = effort != "none"
        sent = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        arguments = sent | arguments
    if request.continue_final_message:
        if request.add_generation_prompt:
            message = (
                "`continue_final_message` and `add_generation_prompt` exclude each other: either the last message goes "
                "on, or a new one begins. Remedy: send add_generation_prompt = false."
            )
            raise ParameterRefused(message, param="continue_final_message")
        return {**arguments, "continue_final_message": True, "add_generation_prompt": False}
    if request.add_generation_prompt is False:
        return {**arguments, "add_generation_prompt": False}
    return arguments
