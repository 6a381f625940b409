"""Reasons why a test of vLLM's does not apply to vsched: tables of patterns, read by the runner and by the shim."""

from __future__ import annotations

import re

INTERNALS = "tests parts of vLLM in its own process"
OF_A_LARGER_MODEL = "judges the answer of a larger model"

FLAGS = {
    "--enable-mm-embeds": "prompts as embeddings",
    "--enable-prompt-embeds": "prompts as embeddings",
    "--uds": "Unix sockets",
    "--middleware": "middleware",
    "--default-mm-loras": "adapters by what a message holds",
    "--return-tokens-as-token-ids": "tokens as ids by a flag of the server",
    "--tool-server": "tools that the server carries out",
    "--watermark-config": "watermarks",
    "--speculative-config": "speculative decoding",
    "--worker-extension-cls": "calls of vLLM's workers",
}
"""Flags of `vllm serve` that change the interface to one that vsched lacks; any other is translated or dropped."""

MODELS = (
    (r"gpt-oss", "GPT-OSS"),
    (r"translategemma", "TranslateGemma"),
    (r"ultravox|omni|whisper", "audio"),
)
"""Models whose own interface is tested, so that no other can replace them."""

TESTS = (
    (r"audio|speech|transcription", "audio"),
    (r"video", "video"),
    (r"replaces_inplace", "judges adapters that were trained"),
    (r"lora_lineage|test_check_models", "where adapters lie on the server"),
    (
        r"lora_(invalid_files|badrequests)|invalid_adapters",
        "an adapter's faults as the server's own",
    ),
    (r"embeds", "prompts as embeddings"),
    (r"harmony|mcp_tools|gpt_oss", "GPT-OSS"),
    (r"sagemaker|test_invocations", "Amazon SageMaker"),
    (r"orca", "ORCA"),
    (r"collective_rpc", "calls of vLLM's workers"),
    (r"tensorizer", "a loader of vLLM's"),
    (r"lmeval", OF_A_LARGER_MODEL),
    (r"beam_?search|test_batch_completions", "beam search"),
    (r"stateful", "answers kept by the server"),
    (r"batched_chat_completions", "conversations in batches"),
    (r"v2_endpoint", "Cohere's API"),
    (r"tokenizer_info", "the tokenizer's configuration"),
    (r"watermark", "watermarks"),
    (r"kv_transfer", "prefill on another server"),
    (r"thinking_token_budget", "a budget of thoughts"),
    (r"truncation_side", "prompts that are truncated"),
    (r"logprob_token_ids(?!.*default_behavior)", "log-probabilities of given tokens"),
    (r"reasoning_tokens_in_usage", "tokens of thoughts in a chat's usage"),
    (r"streaming_cache_usage", "prompts counted as written to a cache"),
    (r"namespace_tool_separator", "tools in namespaces"),
    (r"parsable_context", "tools that the server carries out"),
    (r"enable_response_messages", "the tokens of responses"),
    (r"test_custom_role", "roles of one's own"),
    (r"test_show_version|test_metrics", "names and numbers of vLLM's own"),
    (r"test_long_seed|test_empty_prompt|inplace_false", "wording of vLLM's own"),
    (r"test_chat_echo.*test_top_logprobs", "texts in place of true and numbers"),
    (r"chat_expands_image_placeholders", "counts of another tokenizer"),
    (r"return_token_strs", "tokens as a vocabulary spells them: `token_strs` are texts here"),
    (
        r"logprobs_with_long_prompts",
        "events with text alone: each token has one here, also a half character",
    ),
    (r"test_named_tool_use", "a call's content that is empty: it is null, as OpenAI's"),
    (r"test_(no|enable)_request_id_header", "ids of requests by flag and in one form"),
    (r"error_on_invalid_image_url_type", "image URLs that are no objects: they are taken here"),
)
"""Parts of a test's name that show its subject."""

OTHER_SUBJECTS = {
    "Amazon SageMaker",
    "GPT-OSS",
    "ORCA",
    "TranslateGemma",
    "a loader of vLLM's",
    "calls of vLLM's workers",
    "counts of another tokenizer",
    "judges adapters that were trained",
    OF_A_LARGER_MODEL,
    "names and numbers of vLLM's own",
    "wording of vLLM's own",
}
UNSERVED = {*FLAGS.values(), *dict(MODELS).values(), *dict(TESTS).values()} - OTHER_SUBJECTS
"""Reasons that name features that vsched lacks, or has in another form."""

ERRORS = (
    (r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to", "a download"),
    (r"NameResolutionError|Temporary failure in name resolution", "a download"),
    (r"Max retries exceeded|Network is unreachable", "a download"),
    (r"No module named", "a package that the environment lacks"),
)
"""Errors that are independent of vsched."""

ANSWERS: tuple[tuple[str, str], ...] = (
    (r"test_single_completion", r"assert \d >= 5|prompt_tokens=6"),
    (
        r"test_single_chat_session\[|completion_streaming\[|test_max_tokens\[",
        r"'stop' == 'length'|'completed' == 'incomplete'|prompt_tokens=37",
    ),
    (r"test_response_format_json_(object|schema)", r"^AssertionError: \{"),
    (r"test_complex_message_content", r"assert '.*' == '2'"),
    (
        r"outputs_json_chat|structured_output|streaming_forced_tool_choice\[",
        r"JSONDecodeError: Unterminated string|EOF while parsing",  # it continued until it was cut
    ),
    (r"test_reasoning_item", r"'message' == 'reasoning'"),
    (r"reasoning_tokens_e2e", r"Expected reasoning_tokens"),
    (r"include_reasoning_true|default_includes_reasoning", r"Expected reasoning"),
    (r"function_tool_use\[plain-True", r"assert 0 > 0|has no attribute 'reasoning'"),
    (r"responses/test_basic\.py", r"assert '\d+' in '"),
    (r"test_more_than_one_prompt_logprobs", r"assert 2 == 1"),
    (r"test_chat_streaming", r"assert ''\n"),
    (r"test_parallel|n_parameter", r"unique completions|different responses"),
    # A call that was cut ends in `response.incomplete`, as with OpenAI.
    (r"streaming_types\[", r"len\(\['response\.created'\]\)"),
    (r"streaming_expected_arguments", r"assert 0 >= 2"),
    (
        r"(tool_use|forced_tool_choice)\[(plain-false-)?auto",
        r"assert None is not None|assert 0 > 0",
    ),
    (r"test_anthropic_tool_call", r"'end_turn' == 'tool_use'"),
    (r"chat_completion_with_tool_use", r"startswith"),
    # Text that ends by itself lacks the token that ended it.
    (r"comparison_with_prompt_logprobs", r"text\.endswith\(response_text\)"),
)
"""Failed tests, by name and error, that depend on the model's output: another model is used here.

Whether it calls a tool, reasons, continues for long enough, or repeats itself exactly depends on the model as well.
"""


def by_server(model: str, flags: dict[str, str]) -> str | None:
    """Return the reason why a server of this model with these flags is not started, or None."""
    named = next((FLAGS[flag] for flag in flags if flag in FLAGS), None)
    return named or _first(MODELS, model.lower())


def by_test(name: str) -> str | None:
    """Return the reason why a test of this name (path::test) is not run, or None."""
    return _first(TESTS, name)


def by_failure(name: str, text: str) -> str | None:
    """Return the reason why a failure with this text does not count, or None."""
    if reason := _first(ERRORS, text):
        return reason
    judged = any(re.search(test, name) and re.search(error, text) for test, error in ANSWERS)
    return OF_A_LARGER_MODEL if judged else None


def starts_server(source: str, conftest: str) -> bool:
    """Return True if a file's tests use a server, of their own or from their folder's fixtures."""
    if "RemoteOpenAIServer" in source:
        return True
    return "RemoteOpenAIServer" in conftest and bool(
        re.search(r"def test_\w+\([^)]*\bclient\b", source)
    )


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((reason for pattern, reason in table if re.search(pattern, text)), None)
