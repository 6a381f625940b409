"""Fields that are known but not supported: accepted with neutral values, refused with others.

Clients that were written for another server may send its fields. Each field here has its neutral values and a remedy.

Unknown fields of a request are refused, since a misspelled `temperature` that is ignored is worse than an error, and
OpenAI refuses them. Unknown fields inside messages are ignored: other servers wrote them, clients send them back, and
no template reads them (`server.strict_fields` refuses them).
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from vsched.api.errors import ParameterRefused, shown
from vsched.errors import limit_message


class Neutral(NamedTuple):
    """Neutral values of a field, in addition to null, and the remedy for other values."""

    remedy: str
    values: tuple[Any, ...] = ()


def neutral(*values: Any, remedy: str = "leave it out") -> Neutral:
    """Annotate a field with its neutral values."""
    return Neutral(remedy, values)


_FalseOnly = Annotated[Any, neutral(False)]
_TrueOnly = Annotated[Any, neutral(True)]
_Nothing = Annotated[Any, neutral()]
_NoObject = Annotated[Any, neutral({})]
_Constraint = Annotated[Any, neutral(remedy="send it in structured_outputs")]
_Placement = Annotated[Any, neutral(remedy="leave it out; replicas are chosen by the server")]


class OtherServersFields(msgspec.Struct, kw_only=True):
    """Fields of other servers.

    These are the sampling and extra parameters of vLLM's two request classes, and SGLang's own parameters. Fields of
    plain type `Any` never change an answer here.
    """

    # --- vLLM ---
    use_beam_search: Annotated[Any, neutral(False, remedy="sample, with temperature")] = None
    length_penalty: Annotated[Any, neutral(1, remedy="leave it out; there are no beams")] = None
    early_stopping: _FalseOnly = None
    watermarking: _FalseOnly = None
    truncate_prompt_tokens: Annotated[Any, neutral(remedy="send a prompt that fits")] = None
    truncation_side: Any = None
    allowed_token_ids: Annotated[
        Any, neutral(remedy="send the texts as structured_outputs.choice, or use logit_bias")
    ] = None
    logprob_token_ids: Annotated[Any, neutral(remedy="send top_logprobs")] = None
    repetition_detection: Annotated[
        Any, neutral(remedy="send repetition_penalty or max_tokens")
    ] = None
    thinking_token_budget: Annotated[Any, neutral(-1, remedy="send max_tokens")] = None
    include_reasoning: _TrueOnly = None
    spaces_between_special_tokens: Any = None
    mm_processor_kwargs: _NoObject = None
    documents: Annotated[Any, neutral([], remedy="put them into the messages")] = None
    chat_template: Annotated[Any, neutral("", remedy="serve it with model.chat_template")] = None
    chat_template_content_format: Any = None
    media_io_kwargs: _NoObject = None
    return_prompt_text: Annotated[Any, neutral(False, remedy="ask /tokenize")] = None
    return_token_offsets: _FalseOnly = None
    return_mm_kwargs: Any = None
    kv_transfer_params: _NoObject = None
    ec_transfer_params: _NoObject = None
    vllm_xargs: _NoObject = None
    logits_processors: Annotated[Any, neutral([], remedy="send logit_bias or bad_words")] = None
    routed_experts_prompt_start: Annotated[Any, neutral(0)] = None
    stream_interval: Annotated[Any, neutral(1)] = None
    request_id: Any = None
    session_id: Any = None

    # --- SGLang ---
    lora_path: _Nothing = None
    json_schema: _Constraint = None
    regex: _Constraint = None
    ebnf: _Constraint = None
    stop_regex: Annotated[Any, neutral([], remedy="send stop, or structured_outputs.regex")] = None
    no_stop_trim: Annotated[
        Any, neutral(False, remedy="send include_stop_str_in_output = true")
    ] = None
    separate_reasoning: _TrueOnly = None
    stream_reasoning: _TrueOnly = None
    return_hidden_states: _FalseOnly = None
    return_routed_experts: _FalseOnly = None
    routed_experts_start_len: Annotated[Any, neutral(0)] = None
    return_cached_tokens_details: _FalseOnly = None
    return_prompt_token_ids: Annotated[
        Any, neutral(False, remedy="send return_token_ids = true")
    ] = None
    return_meta_info: _FalseOnly = None
    input_ids: Annotated[Any, neutral(remedy="send them to /v1/completions as prompt")] = None
    task: _Nothing = None
    session_params: _NoObject = None
    custom_params: _NoObject = None
    custom_logit_processor: Annotated[Any, neutral(remedy="send logit_bias or bad_words")] = None
    images_config: _NoObject = None
    max_dynamic_patch: _Nothing = None
    min_dynamic_patch: _Nothing = None
    use_audio_in_video: _FalseOnly = None
    extra_key: Annotated[Any, neutral(remedy="send cache_salt to separate caches")] = None
    ngram_corpus_id: _Nothing = None
    bootstrap_host: _Placement = None
    bootstrap_port: _Placement = None
    bootstrap_room: _Placement = None
    routed_dp_rank: _Placement = None
    disagg_prefill_dp_rank: _Placement = None
    data_parallel_rank: _Placement = None
    custom_labels: Any = None
    rid: Any = None


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Reject unsupported fields that would change the meaning of a request.

    Raises:
        ParameterRefused: With the field, its value, the neutral values and the remedy.
    """
    for name, known in _neutral_fields(type(request)):
        value = getattr(request, name)
        if value is None or any(_same(value, one) for one in known.values):
            continue
        message = limit_message(
            f"`{name}` is not supported with this value",
            value=shown(value),
            limit=" or ".join(_json(one) for one in known.values) or "null",
            remedy=known.remedy,
        )
        raise ParameterRefused(message, param=name, code="unsupported_parameter")


@functools.cache
def _neutral_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Neutral], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, note)
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Neutral)
    )


def _same(value: object, known: object) -> bool:
    # `True == 1` in Python; in a request it is an error.
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
