"""Types of content parts, items and tools of OpenAI's and Anthropic's APIs that are not supported here.

Each is refused by name, with an alternative. For unknown types, the error lists the supported ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from vsched.api.errors import ParameterRefused, shown

_KINDS = {
    "send a transcript as text": "audio audio_url input_audio output_audio",
    "send frames of it as images": "video video_url input_video",
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
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")


def unsupported_type(kind: object, where: str) -> ParameterRefused | None:
    """Return the error for a type that is not supported; None for unknown types. Version dates are ignored."""
    remedy = _REMEDIES.get(_DATE.sub("", kind)) if isinstance(kind, str) else None
    if remedy is None:
        return None
    message = f"`{where}.type` {shown(kind)} is not supported. Remedy: {remedy}."
    return ParameterRefused(message, param=f"{where}.type", code="unsupported_parameter")


def find_unsupported_type(
    body: Any, path: str, *, served: Collection[str]
) -> ParameterRefused | None:
    """Return the error for the outermost object of an unsupported type on a path in a body; None if there is none."""
    value, where = body, ""
    for step in (*_STEP.findall(path), None):
        kind = value.get("type") if isinstance(value, dict) and where else None
        refusal = unsupported_type(kind, where)
        if refusal is not None and kind not in served:
            return refusal
        try:
            value = value[int(step[1:-1])] if step.startswith("[") else value[step]
        except (LookupError, TypeError, ValueError, AttributeError):
            return None
        where += step if step.startswith("[") else f".{step}" if where else step
    return None
