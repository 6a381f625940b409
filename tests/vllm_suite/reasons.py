"""Why a test of vLLM's says nothing about vsched: tables of patterns, read by the runner and by the shim."""

from __future__ import annotations

import re

INTERNALS = "tests parts of vLLM in its own process"

FLAGS = {
    "--enable-mm-embeds": "prompts as embeddings",
    "--enable-prompt-embeds": "prompts as embeddings",
    "--uds": "Unix sockets",
    "--root-path": "a path in front of all paths",
    "--middleware": "middleware of vLLM's",
    "--enable-force-include-usage": "a flag of vLLM's: usage that was not asked for",
    "--tool-server": "tools that the server carries out",
    "--watermark-config": "watermarks",
    "--speculative-config": "speculative decoding",
    "--worker-extension-cls": "a call of vLLM's own",
}
"""Flags of `vllm serve` that change the interface to what vsched has not; any other is translated or dropped."""

MODELS = (
    (r"gpt-oss", "GPT-OSS"),
    (r"translategemma", "TranslateGemma"),
    (r"ultravox|omni|whisper", "audio"),
)
"""Models whose own interface is tested, so that no other stands in for them."""

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
    (
        r"batched_chat_completions|v2_endpoint|tokenizer_info|test_invocations",
        "an endpoint of vLLM's",
    ),
    (r"watermark", "watermarks"),
    (r"kv_transfer", "speaks of a prefill on another server"),
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

ANSWERS: tuple[tuple[str, str], ...] = ()
"""Tests that failed, by name and error, because they judge what the model says: another model is at hand."""

OF_A_LARGER_MODEL = "judges the answer of a larger model"


def by_server(model: str, flags: dict[str, str]) -> str | None:
    """Return why a server of this model with these flags is not started, or None."""
    named = next((FLAGS[flag] for flag in flags if flag in FLAGS), None)
    return named or _first(MODELS, model.lower())


def by_test(name: str) -> str | None:
    """Return why a test of this name (path::test) is not run, or None."""
    return _first(TESTS, name)


def by_failure(name: str, text: str) -> str | None:
    """Return why a test that failed with this text says nothing, or None."""
    if reason := _first(ERRORS, text):
        return reason
    judged = any(re.search(test, name) and re.search(error, text) for test, error in ANSWERS)
    return OF_A_LARGER_MODEL if judged else None


def starts_server(source: str, conftest: str) -> bool:
    """Say whether a file's tests ask a server: its own, or that of its folder's fixtures."""
    if "RemoteOpenAIServer" in source:
        return True
    return "RemoteOpenAIServer" in conftest and bool(
        re.search(r"def test_\w+\([^)]*\bclient\b", source)
    )


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((reason for pattern, reason in table if re.search(pattern, text)), None)
