"""Why a test of vLLM's says nothing about vsched: tables of patterns, read by the runner and by the shim."""

from __future__ import annotations

import re

INTERNALS = "tests parts of vLLM in its own process"

FLAGS = {
    "--enable-lora": "LoRA adapters",
    "--enable-prompt-embeds": "prompts as embeddings",
    "--enable-mm-embeds": "prompts as embeddings",
    "--limit-mm-per-prompt.audio": "audio",
    "--uds": "Unix sockets",
    "--root-path": "a path in front of all paths",
    "--load-format": "a loader of vLLM's",
    "--middleware": "middleware of vLLM's",
    "--runner": "pooling models",
    "--enable-force-include-usage": "a flag of vLLM's",
    "--enable-server-load-tracking": "a flag of vLLM's",
    "--enable-request-id-headers": "a flag of vLLM's",
    "--enable-tokenizer-info-endpoint": "a flag of vLLM's",
    "--reasoning-parser": "a model that thinks",
    "--tool-call-parser": "a model that calls tools",
}
"""Flags of `vllm serve` that ask for what vsched has not, or for a model that is not at hand."""

TESTS = (
    (r"audio|speech|transcription", "audio"),
    (r"video", "video"),
    (r"lora", "LoRA adapters"),
    (r"embeds", "prompts as embeddings"),
    (r"harmony|mcp_tools|gpt_oss", "GPT-OSS"),
    (r"sagemaker", "Amazon SageMaker"),
    (r"orca", "ORCA"),
    (r"collective_rpc", "a call of vLLM's own"),
    (r"tensorizer", "a loader of vLLM's"),
    (r"lmeval", "needs the scores of a larger model"),
    (r"beam_search", "beam search"),
    (r"stateful", "answers kept by the server"),
    (r"thinking_token_budget|include_reasoning", "a model that thinks"),
    (r"batched_chat_completions", "an endpoint of vLLM's"),
    (r"translategemma|extra_content_fields", "TranslateGemma"),
    (r"function_call|namespace_tool_separator|parsable_context", "a model that calls tools"),
)
"""Parts of a test's name that tell what it is about."""

ERRORS = (
    (
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to|Network is unreachable",
        "a download",
    ),
    (
        r"NameResolutionError|Temporary failure in name resolution|Max retries exceeded",
        "a download",
    ),
    (r"No module named", "a package that the environment lacks"),
)
"""Errors of a test that vsched has no part in."""


def by_flags(arguments: list[str]) -> str | None:
    """Return why a server with these arguments is not started, or None."""
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name in FLAGS:
            return FLAGS[name]
    return None


def by_test(name: str) -> str | None:
    """Return why a test of this name (path::test) is not run, or None."""
    return _first(TESTS, name)


def by_error(text: str) -> str | None:
    """Return why a test that failed with this text says nothing, or None."""
    return _first(ERRORS, text)


def starts_server(source: str, conftest: str) -> bool:
    """Say whether a file's tests ask a server: its own, or that of its folder's fixtures."""
    if "RemoteOpenAIServer" in source:
        return True
    return "RemoteOpenAIServer" in conftest and bool(
        re.search(r"def test_\w+\([^)]*\bclient\b", source)
    )


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((reason for pattern, reason in table if re.search(pattern, text)), None)
