"""Response bodies in OpenAI's format: None becomes null, UNSET is left out."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct):
    """Origin of prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A sampled token and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionOutput(msgspec.Struct):
    """The called function; `arguments` is JSON text, or the next piece of it in a chunk."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallOutput(msgspec.Struct):
    """A complete tool call."""

    id: str
    function: FunctionOutput
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    """An increment of a tool call; the first one has its id, type and name."""

    index: int
    function: FunctionOutput
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The message; `content` is null if it has only tool calls. `reasoning` is vLLM's name of `reasoning_content`."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallOutput] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """A token at a prompt position, in vLLM's format; the most likely one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token: itself and its alternatives by id; None for the first."""


class ChatChoice(msgspec.Struct):
    """A choice of a chat response."""

    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    index: int = 0
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct):
    """A non-streaming chat response; vLLM's additional fields are null unless requested."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(msgspec.Struct):
    """An increment of the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A choice of a chat chunk."""

    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """A piece of a streamed chat response."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a choice, one entry per token in each list; null for the first token of an echo."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A choice of a completion; in a non-streaming one, fields that were not requested are null."""

    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    index: int = 0
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct):
    """A text completion, complete or a streamed piece."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    object: str = "text_completion"


class Model(msgspec.Struct):
    """The served model, or an adapter; `parent` is the base model of an adapter, `root` the base model in both cases.

    In vLLM, `root` is a folder; file locations are not exposed to clients here.
    """

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "vsched"
    parent: str | None = None


class AdapterRow(msgspec.Struct):
    """An adapter, with details for operators; `running` counts requests in progress, `requests` all so far."""

    name: str
    state: str
    path: str = ""
    rank: int = 0
    changes_encoder: bool = False
    running: int = 0
    requests: int = 0


class AdapterList(msgspec.Struct):
    """All adapters."""

    adapters: list[AdapterRow]


class ModelList(msgspec.Struct):
    """The model, and its adapters."""

    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct):
    """The response of /tokenize; `token_strs` is set if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The response of /detokenize: the text of the tokens, including special ones."""

    prompt: str


class GroupAction(msgspec.Struct):
    """The response of POST /admin/replicas; `done` is false if the deadline passed first."""

    group: str
    action: str
    done: bool
    state: str


class State(msgspec.Struct):
    """The response of /health: the engine's state."""

    status: str


class Version(msgspec.Struct):
    """The response of /version."""

    version: str


class Load(msgspec.Struct):
    """The response of /load: completions in progress, including streams."""

    server_load: int
