"""Request bodies as msgspec structs; types and simple bounds are checked while decoding.

OpenAI's fields that do not change the answer are accepted and ignored. Fields that would change it are accepted only
with neutral values (`unsupported`). An unknown field is an error, so that a misspelt `temperature` is not lost. In
messages and nested objects unknown fields are ignored, because histories contain fields of other servers, unless the
settings ask for strictness (`bodies.reading`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from vsched.api.unsupported import neutral

_MAX_INT32 = 2**31 - 1
NAME = r"[\w.:/-]{1,128}"
"""Pattern of function names."""

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=10)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
FrameRate = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT32)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT32)]
Int32 = Annotated[int, msgspec.Meta(ge=-_MAX_INT32, le=_MAX_INT32)]
Alternatives = Annotated[int, msgspec.Meta(ge=-1, le=_MAX_INT32)]
"""Number of alternatives to report per token; -1 for the whole vocabulary."""
TemplateArguments = dict[str, bool | int | float | str]


class ImageUrl(msgspec.Struct):
    """Location of an image, missing for an image that is sent by name; `detail` is OpenAI's and ignored."""

    url: str | None = None
    detail: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class InputTextPart(TextPart, tag="input_text"):
    """A text part of /v1/responses."""


class AnswerTextPart(TextPart, tag="output_text"):
    """A text part of an earlier response of /v1/responses."""


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of the assistant, in the history."""

    refusal: str


class ThinkingPart(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the assistant, in the history."""

    thinking: str


class RedactedThinkingPart(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is dropped."""


AttentionSpans = Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=16)]
"""Spans of an item's tokens, [start, stop), with bidirectional attention, in place of the model's."""


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image by reference; with a `uuid`, later requests can send only that.

    It is resized to between `min_pixels` and `max_pixels`, which replace the checkpoint's bounds.
    """

    image_url: ImageUrl | str | None = None
    uuid: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    min_pixels: PositiveCount | None = None
    max_pixels: PositiveCount | None = None
    attention_spans: AttentionSpans | None = None


class InputImagePart(ImagePart, tag="input_image"):
    """An image part of /v1/responses."""


class VideoOptions(msgspec.Struct):
    """Sampling of a video's frames: a rate or a number, and a maximum."""

    fps: FrameRate | None = None
    num_frames: PositiveCount | None = None
    max_frames: PositiveCount | None = None


class VideoPart(VideoOptions, tag_field="type", tag="video_url", kw_only=True):
    """A video by reference; `min_pixels` and `max_pixels` replace the bounds of the video processor."""

    video_url: ImageUrl | str
    min_pixels: PositiveCount | None = None
    max_pixels: PositiveCount | None = None
    attention_spans: AttentionSpans | None = None


class FramesPart(VideoOptions, tag_field="type", tag="video", kw_only=True):
    """A video, in Qwen's format: its URL, or the URLs of its frames as images, which were sampled at `fps`."""

    video: str | list[str]
    min_pixels: PositiveCount | None = None
    max_pixels: PositiveCount | None = None
    attention_spans: AttentionSpans | None = None


class EmbedsFile(msgspec.Struct):
    """A safetensors file with `embeds` and its companions, such as `grid_thw`: its base64, or its URL."""

    data: str = ""
    url: str = ""


class ImageEmbedsPart(msgspec.Struct, tag_field="type", tag="image_embeds"):
    """An image given as its embedding."""

    image_embeds: EmbedsFile
    attention_spans: AttentionSpans | None = None


class VideoEmbedsPart(msgspec.Struct, tag_field="type", tag="video_embeds"):
    """A video given as the embeddings of its frame groups."""

    video_embeds: EmbedsFile
    attention_spans: AttentionSpans | None = None


ContentPart = (
    TextPart
    | InputTextPart
    | AnswerTextPart
    | RefusalPart
    | ThinkingPart
    | RedactedThinkingPart
    | ImagePart
    | InputImagePart
    | ImageEmbedsPart
    | VideoEmbedsPart
    | VideoPart
    | FramesPart
)


class ImageArea(msgspec.Struct, forbid_unknown_fields=True):
    """Pixel bounds, by the names of Hugging Face's image processors."""

    shortest_edge: PositiveCount | None = None
    longest_edge: PositiveCount | None = None


class ProcessorArguments(VideoOptions, forbid_unknown_fields=True):
    """Processing options for the images and videos of a request, by vLLM's names.

    `size` is another form of the two bounds.
    """

    min_pixels: PositiveCount | None = None
    max_pixels: PositiveCount | None = None
    size: ImageArea | None = None


class StrictVideoOptions(VideoOptions, forbid_unknown_fields=True):
    """`VideoOptions` without other fields."""


class MediaArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Reading options by vLLM's names: sampling of videos."""

    video: StrictVideoOptions | None = None


class CalledFunction(msgspec.Struct):
    """A function call of the assistant; `arguments` is JSON text, possibly truncated, or a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """A tool call in an assistant message that a client sends back."""

    function: CalledFunction
    id: str | None = None
    type: Any = None
    index: Any = None


class Message(msgspec.Struct):
    """One message; assistant fields that no chat template uses are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: CalledFunction | None = None
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
    """A tool in OpenAI's format; only functions are supported."""

    type: str = "function"
    function: FunctionTool | None = None


class NamedTool(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedChoice(msgspec.Struct):
    """A tool by the name of its function."""

    function: NamedTool | None = None


class AllowedTools(msgspec.Struct):
    """The tools that may be called, or one of which must be called."""

    mode: str
    tools: list[NamedChoice]


class ToolChoice(msgspec.Struct):
    """Tool choice in object form."""

    type: str
    function: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


class StreamOptions(msgspec.Struct):
    """Optional contents of a stream besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Any = None


JsonSchema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct):
    """A schema in OpenAI's format; `strict` has no effect, because every schema is enforced."""

    name: str | None = None
    description: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Response format in OpenAI's form: `text`, `json_object` or `json_schema`.

    `schema` next to `json_object` is not OpenAI's; clients such as instructor send it, and it is enforced.
    """

    type: str
    json_schema: NamedSchema | None = None
    schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Structured output in vLLM's form; the options are accepted with neutral values."""

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


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of all APIs; in Anthropic's and OpenAI's Responses API, those from `min_p` on are extensions."""

    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_INT32)] | None = None

    min_p: Probability | None = None
    min_tokens: Count = 0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool = False
    priority: Int32 = 0
    ttft_target_ms: PositiveCount | None = None
    cache_salt: str | None = None


_FalseOnly = Annotated[Any, neutral(False)]
_TrueOnly = Annotated[Any, neutral(True)]
_Nothing = Annotated[Any, neutral()]
_NoObject = Annotated[Any, neutral({})]
_Constraint = Annotated[Any, neutral(remedy="send it in structured_outputs")]
_Placement = Annotated[Any, neutral(remedy="leave it out; replicas are chosen by the server")]


class SamplingFields(CommonFields, kw_only=True):
    """Fields of chat and text completions.

    Those of other servers are the sampling and extra parameters of vLLM's two request classes, and SGLang's own
    parameters; those of plain type `Any` never change an answer here.
    """

    stream_options: StreamOptions | None = None

    max_tokens: PositiveCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None

    n: PositiveCount | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

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


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    messages: list[Message]
    best_of: Annotated[Any, neutral(1, remedy="send n, and select one of the choices")] = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    add_special_tokens: Annotated[Any, neutral(False, remedy="leave it to the template")] = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    media_io_kwargs: MediaArguments | None = None

    audio: Annotated[Any, neutral(remedy="ask for text")] = None
    function_call: Annotated[Any, neutral("none", "auto", remedy="send tool_choice and tools")] = (
        None
    )
    functions: Annotated[
        Any, neutral([], remedy="send each in tools, as {type: function, function: ...}")
    ] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    prediction: Annotated[Any, neutral()] = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    web_search_options: Annotated[Any, neutral()] = None

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
    """The body of /v1/completions; `max_tokens` defaults to 16, or `min_tokens` if that is more."""

    prompt: str | list[str | Count | list[Count]]
    max_tokens: Count | None = None
    logprobs: Alternatives | None = None
    best_of: PositiveCount | None = None

    echo: bool | None = None
    suffix: Annotated[
        Any, neutral("", remedy="leave it out; the models served here only write on from a prompt")
    ] = None
    prompt_embeds: Annotated[Any, neutral(remedy="send a text or token ids")] = None
    add_special_tokens: Annotated[Any, neutral(True, remedy="send token ids")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt or messages.

    By default, special tokens are added to a prompt, as for a completion, but not to rendered messages;
    `add_special_tokens` overrides this.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: Annotated[Any, neutral("", remedy="serve it with model.chat_template")] = None
    chat_template_kwargs: TemplateArguments | None = None
    media_io_kwargs: MediaArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[Count]
    model: str | None = None


class AdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/adapters: the name of the adapter, and its path below adapters.directory."""

    name: str
    path: str


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/load_lora_adapter, in vLLM's format."""

    lora_name: str
    lora_path: str


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/unload_lora_adapter, in vLLM's format."""

    lora_name: str


class GroupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/replicas: a group, and the action to carry out on it."""

    group: str
    action: str


PolicyTables = dict[str, dict[str, Any]]
"""The body of POST /admin/policies, and its response: configuration tables of policies by path."""


def deeper(value: object, depth: int) -> bool:
    """True if a JSON value is nested deeper than `depth`."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(deeper(one, depth - 1) for one in inner)
