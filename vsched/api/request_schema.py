"""The bodies of requests, as msgspec structs: types and plain bounds are checked while decoding.

Fields that OpenAI knows and that do not change the answer are accepted and ignored. Fields that would change it are
accepted only with the value that changes nothing; `parameters.refuse_unsupported` tells. A field that nobody knows is
an error: a misspelt `temperature` must not be lost.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

_MAX_INT32 = 2**31 - 1

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT32)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT32)]
Int32 = Annotated[int, msgspec.Meta(ge=-_MAX_INT32, le=_MAX_INT32)]


class ImageUrl(msgspec.Struct):
    """Where an image is; `detail` is OpenAI's and ignored."""

    url: str
    detail: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image by reference."""

    image_url: ImageUrl | str


class ImageEmbeds(msgspec.Struct, forbid_unknown_fields=True):
    """A finished embedding: base64 of a safetensors file with `embeds` and its companion, such as `grid_thw`."""

    data: str


class ImageEmbedsPart(msgspec.Struct, tag_field="type", tag="image_embeds"):
    """An image by its embedding."""

    image_embeds: ImageEmbeds


class CalledFunction(msgspec.Struct):
    """Which function an assistant called; `arguments` is JSON, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    """A call in an assistant's message, as a client sends it back."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message; the nulls that the openai client sends back with an assistant's message are accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart | ImageEmbedsPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class FunctionTool(msgspec.Struct):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool as OpenAI has it; functions are the only kind that is served."""

    type: str = "function"
    function: FunctionTool | None = None


class NamedTool(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedChoice(msgspec.Struct):
    """A tool by the name of its function."""

    function: NamedTool | None = None


class AllowedTools(msgspec.Struct):
    """Some of the tools, of which one may be called or must be."""

    mode: str
    tools: list[NamedChoice]


class ToolChoice(msgspec.Struct):
    """Which tool is to be called, as an object."""

    type: str
    function: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool = False


JsonSchema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct):
    """A schema as OpenAI has it; `strict` changes nothing, for every schema is kept to."""

    name: str | None = None
    description: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of an answer as OpenAI has it: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer as vLLM has it; the options are accepted at their neutral values."""

    json: str | JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    max_tokens: PositiveCount | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool = False
    priority: Int32 = 0
    ttft_target_ms: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT32)] | None = None
    cache_salt: str | None = None

    n: Any = None
    best_of: Any = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Any = None

    user: Any = None
    metadata: Any = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    web_search_options: Any = None

    moderation: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions."""

    prompt: str | list[str | Count | list[Count]]
    logprobs: Count | None = None

    echo: Any = None
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None


class GroupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/replicas: what to do with which group."""

    group: str
    action: str
