"""Fields that are known but not supported: accepted with neutral values, refused with others.

Clients that were written for another server may send its fields. Each field here has its neutral values and a remedy.

Unknown fields of a request are refused, since a misspelled `temperature` that is ignored is worse than an error, and
OpenAI refuses them. Unknown fields inside messages are ignored: other servers wrote them, clients send them back, and
no template reads them (`server.strict_fields` refuses them).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_type_hints

import msgspec

from vsched.api.errors import ParameterRefused, shown


class Neutral(NamedTuple):
    """Neutral values of a field, in addition to null, and the remedy for other values."""

    remedy: str
    values: tuple[Any, ...] = ()


def neutral(*values: Any, remedy: str = "leave it out") -> Neutral:
    """Annotate a field with its neutral values."""
    return Neutral(remedy, values)


Request = TypeVar("Request", bound=msgspec.Struct)


def with_fields(
    fields: Mapping[str, Neutral | None],
) -> Callable[[type[Request]], type[Request]]:
    """Add fields to a request, given as names between spaces; those without neutral values are ignored."""
    made = [
        (name, Any if known is None else Annotated[Any, known], None)
        for names, known in fields.items()
        for name in names.split()
    ]

    def add(cls: type[Request]) -> type[Request]:
        whole = msgspec.defstruct(
            cls.__name__,
            made,
            bases=(cls,),
            module=cls.__module__,
            namespace={"__doc__": cls.__doc__},
            kw_only=True,
        )
        return cast("type[Request]", whole)

    return add


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Reject unsupported fields that would change the meaning of a request.

    Raises:
        ParameterRefused: With the field, its value, the neutral values and the remedy.
    """
    for name, known in _neutral_fields(type(request)):
        value = getattr(request, name)
        if value is None or any(_same(value, one) for one in known.values):
            continue
        raise ParameterRefused.of_limit(
            f"`{name}` is not supported with this value",
            value=shown(value),
            limit=" or ".join(msgspec.json.encode(one).decode() for one in known.values) or "null",
            remedy=known.remedy,
            param=name,
            code="unsupported_parameter",
        )


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


_KINDS = {
    "send a transcript as text": "audio audio_url input_audio output_audio",
    "send it as video_url, or frames of it as images": "input_video",
    "send its text as text, or its pages as images": "file input_file document container_upload",
    "send the summary as text": "compaction compaction_trigger",
    "send the history itself; the server keeps nothing": "item_reference fallback configuration_update",
    # --- tools ---
    "describe it as a function with one string argument": "custom",
    "send its functions as separate tools": "namespace",
    "describe it as a function for the client to carry out": """
        bash text_editor memory computer computer_use computer_use_preview local_shell shell apply_patch
        browser_toolset computer_toolset""",
    "leave it out, or describe a function for the client to carry out; this server runs no tools": """
        web_search web_search_preview web_fetch file_search code_interpreter code_execution image_generation mcp
        mcp_toolset advisor tool_search tool_search_tool_bm25 tool_search_tool_regex programmatic_tool_calling""",
    "send all tools of the request in tools": "additional_tools tool_addition tool_removal",
    # --- calls of these tools, in histories ---
    "send it as function_call and function_call_output": "custom_tool_call custom_tool_call_output",
    "leave it out of the history, or send its content as text; this server runs no tools": """
        web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
        local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output
        mcp_list_tools mcp_approval_request mcp_approval_response mcp_call tool_search_call tool_search_output
        program program_output server_tool_use web_search_tool_result web_fetch_tool_result
        code_execution_tool_result bash_code_execution_tool_result text_editor_code_execution_tool_result
        tool_search_tool_result advisor_tool_result mcp_tool_use mcp_tool_result mcp_tool_listing browser_state""",
}
_REMEDIES = {kind: remedy for remedy, kinds in _KINDS.items() for kind in kinds.split()}
_DATE = re.compile(r"_\d{4}_?\d{2}_?\d{2}\Z")


def unsupported_type(kind: object, where: str) -> ParameterRefused | None:
    """Return the error for a type that is not supported; None for unknown types. Version dates are ignored."""
    remedy = _REMEDIES.get(_DATE.sub("", kind)) if isinstance(kind, str) else None
    if remedy is None:
        return None
    message = f"`{where}.type` {shown(kind)} is not supported. Remedy: {remedy}."
    return ParameterRefused(message, param=f"{where}.type", code="unsupported_parameter")


def find_unsupported_type(
    values: Iterable[tuple[str, Any]], *, served: Collection[str]
) -> ParameterRefused | None:
    """Return the error for the first object of an unsupported type, of paths and values; None if there is none."""
    for where, value in values:
        kind = value.get("type") if isinstance(value, dict) and where else None
        refusal = unsupported_type(kind, where)
        if refusal is not None and kind not in served:
            return refusal
    return None


_HISTORY = "send the whole history with each request; nothing is kept between requests"
_NOT_SERVED = {
    "send it to a server of such a model; this one generates text": """
        /v1/embeddings /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /v1/moderations
        /v1/images /v1/videos /v1/audio /v1/realtime /v1/live""",
    "send requests, with images as URLs or data URLs, as many at a time as you like; the server batches them": """
        /v1/batches /v1/messages/batches /v1/files /v1/uploads""",
    _HISTORY: """
        /v1/conversations /v1/assistants /v1/threads /v1/responses/compact
        /v1/responses/{id}/input_items /v1/chat/completions/{id}/messages""",
    "send it to /v1/completions, /v1/chat/completions or /v1/messages": "/v1/complete /v1/edits /v1/engines",
    "send its input as messages to /tokenize or /v1/messages/count_tokens": "/v1/responses/input_tokens",
    "close the connection that waits for it; that ends the request": "/v1/responses/{id}/cancel",
    "leave it to the client or an operator; the server only answers requests": """
        /v1/agents /v1/chatkit /v1/compliance /v1/containers /v1/content_provenance_checks /v1/decisions
        /v1/deployments /v1/deployment_runs /v1/dreams /v1/environments /v1/evals /v1/fine_tuning /v1/fine-tunes
        /v1/memory_stores /v1/organization /v1/organizations /v1/projects /v1/safety /v1/sessions /v1/skills
        /v1/tunnels /v1/user_profiles /v1/vaults /v1/vector_stores /v1/webhook_endpoints /v1/webhook_event_types""",
}
"""Paths of other servers' APIs, which include all paths below them, by remedy."""
_STORED = "leave it out; answers are not stored"
_PATTERNS = [
    (
        re.compile(re.escape(path).replace(r"\{id\}", "[^/]+") + "(/.*)?"),
        path.rpartition("/")[2],
        remedy,
    )
    for remedy, paths in _NOT_SERVED.items()
    for path in paths.split()
]
_STORED_PATH = re.compile("/v1/(chat/completions|responses)/.+")


def not_served(path: str, method: str = "GET") -> str | None:
    """Return the error message for a known path that is not served; None for any other path."""
    for pattern, name, remedy in _PATTERNS:
        if pattern.fullmatch(path):
            return _message(path, name, remedy)
    if method != "GET" and _STORED_PATH.fullmatch(path):
        return _message(path, "a stored answer", _STORED)
    return None


def _message(path: str, name: str, remedy: str) -> str:
    return f"`{path[:100]}` is not served ({name}). Remedy: {remedy}."
