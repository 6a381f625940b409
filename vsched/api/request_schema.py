"""Request bodies as msgspec structs; types and simple bounds are checked while decoding.

OpenAI's fields that do not change the answer are accepted and ignored. Fields that would change it are accepted only
with neutral values (`unsupported`). An unknown field is an error, so that a misspelt `temperature` is not lost. In
messages and nested objects unknown fields are ignored, because histories contain fields of other servers, unless the
settings ask for strictness (`bodies.reading`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from vsched.api.unsupported import neutral, with_fields

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
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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


class VideoProcessing(VideoOptions):
    """Sampling of a video, and bounds of its pixels in place of the video processor's."""

    min_pixels: PositiveCount | None = None
    max_pixels: PositiveCount | None = None


class VideoUrl(VideoProcessing):
    """Location of a video."""

    url: str = ""


class VideoPart(VideoProcessing, tag_field="type", tag="video_url", kw_only=True):
    """A video by reference; options next to `video_url` come before those in it."""

    video_url: VideoUrl | str
    attention_spans: AttentionSpans | None = None


class FramesPart(VideoProcessing, tag_field="type", tag="video", kw_only=True):
    """A video, in Qwen's format: its URL, or the URLs of its frames as images, which were sampled at `fps`."""

    video: str | list[str]
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


class ProcessorArguments(VideoProcessing, forbid_unknown_fields=True):
    """Processing options for the images and videos of a request, by vLLM's names.

    `size` is another form of the two bounds.
    """

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


@with_fields(
    {
        "guided_decoding_backend user metadata": None,
        # --- vLLM ---
        "truncation_side spaces_between_special_tokens chat_template_content_format": None,
        "return_mm_kwargs request_id session_id": None,
        "early_stopping watermarking return_token_offsets": neutral(False),
        "include_reasoning": neutral(True),
        "mm_processor_kwargs media_io_kwargs": neutral({}),
        "kv_transfer_params ec_transfer_params vllm_xargs": neutral({}),
        "routed_experts_prompt_start": neutral(0),
        "stream_interval": neutral(1),
        "use_beam_search": neutral(False, remedy="sample, with temperature"),
        "length_penalty": neutral(1, remedy="leave it out; there are no beams"),
        "truncate_prompt_tokens": neutral(remedy="send a prompt that fits"),
        "allowed_token_ids": neutral(
            remedy="send the texts as structured_outputs.choice, or use logit_bias"
        ),
        "logprob_token_ids": neutral(remedy="send top_logprobs"),
        "repetition_detection": neutral(remedy="send repetition_penalty or max_tokens"),
        "thinking_token_budget": neutral(-1, remedy="send max_tokens"),
        "documents": neutral([], remedy="put them into the messages"),
        "chat_template": neutral("", remedy="serve it with model.chat_template"),
        "return_prompt_text": neutral(False, remedy="ask /tokenize"),
        "logits_processors": neutral([], remedy="send logit_bias or bad_words"),
        # --- SGLang ---
        "custom_labels rid": None,
        "return_hidden_states return_routed_experts return_meta_info": neutral(False),
        "return_cached_tokens_details use_audio_in_video": neutral(False),
        "separate_reasoning stream_reasoning": neutral(True),
        "lora_path task max_dynamic_patch min_dynamic_patch ngram_corpus_id": neutral(),
        "session_params custom_params images_config": neutral({}),
        "routed_experts_start_len": neutral(0),
        "json_schema regex ebnf": neutral(remedy="send it in structured_outputs"),
        "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank "
        "data_parallel_rank": neutral(remedy="leave it out; replicas are chosen by the server"),
        "stop_regex": neutral([], remedy="send stop, or structured_outputs.regex"),
        "no_stop_trim": neutral(False, remedy="send include_stop_str_in_output = true"),
        "return_prompt_token_ids": neutral(False, remedy="send return_token_ids = true"),
        "input_ids": neutral(remedy="send them to /v1/completions as prompt"),
        "custom_logit_processor": neutral(remedy="send logit_bias or bad_words"),
        "extra_key": neutral(remedy="send cache_salt to separate caches"),
    }
)
class SamplingFields(CommonFields, kw_only=True):
    """Fields of chat and text completions.

    Those of other servers are the sampling and extra parameters of vLLM's two request classes, and SGLang's own
    parameters; those without neutral values never change an answer here.
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


@with_fields(
    {
        "moderation prompt_cache_key prompt_cache_options prompt_cache_retention": None,
        "safety_identifier service_tier store verbosity": None,
        "prediction web_search_options": neutral(),
        "best_of": neutral(1, remedy="send n, and select one of the choices"),
        "add_special_tokens": neutral(False, remedy="leave it to the template"),
        "audio": neutral(remedy="ask for text"),
        "modalities": neutral(["text"]),
        "function_call": neutral("none", "auto", remedy="send tool_choice and tools"),
        "functions": neutral([], remedy="send each in tools, as {type: function, function: ...}"),
    }
)
class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    messages: list[Message]
    echo: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    media_io_kwargs: MediaArguments | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


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
