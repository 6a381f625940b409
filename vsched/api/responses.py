"""The bodies of responses, in OpenAI's shapes: None becomes null, UNSET is left out."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens that a request took."""

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
    """Which function is called; `arguments` is JSON, or the next piece of it in a chunk."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallOutput(msgspec.Struct):
    """A call of a whole answer."""

    id: str
    function: FunctionOutput
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to a call; the first one of a call has its id, type and name."""

    index: int
    function: FunctionOutput
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The message; `content` is None if it has only tool calls. `reasoning` is vLLM's name of `reasoning_content`."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallOutput] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """A token at a place of a prompt, as vLLM has it; the most likely one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each prompt token: itself and its alternatives, by their ids; None of the first."""


class ChatChoice(msgspec.Struct):
    """A choice of a chat response."""

    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    index: int = 0
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct):
    """A whole chat response; what vLLM adds is null where it was not asked for, as there."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the answer."""

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
    """Log-probabilities of a completion choice, one entry a token in each list; None of the first of an echo."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A choice of a completion, whole or streamed; in a whole one what was not asked for is null."""

    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    index: int = 0
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct):
    """A completion, whole or a piece of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    object: str = "text_completion"


class Model(msgspec.Struct):
    """The served model, or an adapter; `parent` is the model that an adapter is of, `root` the served one for all.

    vLLM has folders in `root`; where files lie is not told to clients here.
    """

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "vsched"
    parent: str | None = None


class AdapterRow(msgspec.Struct):
    """An adapter as an operator sees it; `running` are requests that go on with it, `requests` all that named it."""

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
    """The answer of /tokenize; `token_strs` where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The answer of /detokenize: the text of the tokens, special ones included."""

    prompt: str


class GroupAction(msgspec.Struct):
    """The answer of POST /admin/replicas; `done` is false where a deadline passed before."""

    group: str
    action: str
    done: bool
    state: str


class State(msgspec.Struct):
    """The answer of /health: the engine's state."""

    status: str


class Version(msgspec.Struct):
    """The answer of /version."""

    version: str


class Load(msgspec.Struct):
    """The answer of /load: completions that are being served, streams included."""

    server_load: int
