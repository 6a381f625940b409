from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, accepted, body_of, chat, post, refusal
from tests.unit.media.fakes import FakePreprocessor
from vsched.types import SamplingDefaults

DEFAULTS = {
    "max_tokens": 0, "temperature": 1.0, "top_k": 0, "stop": (), "logprobs": None,
    "show_special": False,
}  # fmt: skip


@each_case(
    ("path", "fields", "wanted"),
    [
        (PLAIN, {"prompt": "ab"}, {"prompt": "ab"}),
        (PLAIN, {"prompt": ["ab"]}, {"prompt": "ab"}),
        (PLAIN, {"prompt": [1, 2]}, {"prompt": [1, 2]}),
        (PLAIN, {"prompt": [[1, 2]]}, {"prompt": [1, 2]}),
        # 16 tokens as in OpenAI's and vLLM's completions; chats have no such default.
        (PLAIN, {}, {"max_tokens": 16}),
        (PLAIN, {"max_tokens": None}, {"max_tokens": 16}),
        (PLAIN, {"max_tokens": 40}, {"max_tokens": 40}),
        (PLAIN, {"min_tokens": 20}, {"max_tokens": 20}),
        (CHAT, {"top_k": -1, "temperature": None, "stop": None}, DEFAULTS),
        (CHAT, {"skip_special_tokens": True}, {"show_special": False}),
        (CHAT, {"skip_special_tokens": False}, {"show_special": True}),
        (PLAIN, {"skip_special_tokens": False}, {"show_special": True}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}},
            {"prompt": "enable_thinking=False;user:hi"}),
        # The prompt may go on with the last message.
        (CHAT, {"add_generation_prompt": True}, {"prompt": "user:hi"}),
        (CHAT, {"add_generation_prompt": False}, {"prompt": "add_generation_prompt=False;user:hi"}),
        (CHAT, {"continue_final_message": True},
            {"prompt": "continue_final_message=True;add_generation_prompt=False;user:hi"}),
        (CHAT, {"prompt_cache_key": "talk-7"}, {"session": "talk-7"}),
        (CHAT, {"prompt_cache_key": None}, {"session": ""}),
        (CHAT, {"prompt_cache_key": 5}, {"session": ""}),
    ],
)  # fmt: skip
async def test_fields_arrive(path: str, fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    engine = await accepted(path, body_of(path, **fields))
    found = engine.calls[0] | msgspec.to_builtins(engine.sampling)
    assert {name: found[name] for name in wanted} == wanted


SENT = {
    "max_completion_tokens": 5, "max_tokens": 9, "min_tokens": 2, "temperature": 0, "top_p": 0.5,
    "top_k": 7, "min_p": 0.1, "seed": -1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": -0.3, "stop": "END", "include_stop_str_in_output": True,
    "stop_token_ids": [5], "ignore_eos": True, "logprobs": True, "top_logprobs": 3,
    "priority": -4, "ttft_target_ms": 250, "cache_salt": "tenant",
}  # fmt: skip
ARRIVED = {
    "max_tokens": 5, "min_tokens": 2, "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1,
    "seed": 2**63 - 1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": -0.3, "stop": ("END",), "include_stop": True, "stop_token_ids": (5,),
    "ignore_eos": True, "show_special": False, "logprobs": 3, "prompt_logprobs": None,
    "prompt_only": False, "logit_bias": (), "bad_words": (), "grammar": "",
}  # fmt: skip


async def test_every_sampling_field_arrives() -> None:
    engine = await accepted(CHAT, chat(**SENT))
    assert msgspec.to_builtins(engine.sampling) == ARRIVED
    call = engine.calls[0]
    assert (call["ttft_target_ms"], call["priority"], call["cache_salt"]) == (250, -4, "tenant")


async def test_absent_seeds_differ() -> None:
    engine = FakeEngine()
    for _ in range(2):
        await post(engine, CHAT, chat())
    first, second = (call["sampling"].seed for call in engine.calls)
    assert first != second


async def test_absent_sampling_fields_are_as_the_checkpoint_states() -> None:
    """A field of the request wins, even if it disables something."""
    engine = FakeEngine()
    stated: dict[str, Any] = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.05,
    }  # fmt: skip
    sampling = SamplingDefaults(**stated)
    engine.preprocessor.info = msgspec.structs.replace(engine.info, sampling=sampling)
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for sent, wanted in (({}, stated), (given, given), ({"top_k": -1}, stated | {"top_k": 0})):
        await post(engine, CHAT, chat(**sent))
        assert wanted.items() <= msgspec.to_builtins(engine.sampling).items()


@each_case(
    ("path", "fields"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": -1}),
        (PLAIN, {"logprobs": -1}),
        (PLAIN, {"prompt_logprobs": -1}),
    ],
)
async def test_logprobs_of_all_tokens_need_the_setting(path: str, fields: dict[str, Any]) -> None:
    """-1 means the size of the vocabulary, of the output or of the prompt."""
    error = await refusal(path, body_of(path, **fields))
    wanted = "value 256, limit 20. Remedy: ask for fewer or raise server.logprobs_max"
    assert wanted in error["message"]
    engine = await accepted(path, body_of(path, **fields), logprobs_max=256)
    found = engine.sampling
    asked_of_prompt = "prompt_logprobs" in fields
    assert (found.prompt_logprobs if asked_of_prompt else found.logprobs) == 256


async def test_biases_and_bad_words_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad word is forbidden at the start of a text and after a space, and is tokenized off the loop."""
    threads: set[int] = set()
    tokenize = FakeEngine().preprocessor.tokenize

    def noted(_: object, text: str, *, images: bool = True) -> list[int]:
        threads.add(threading.get_ident())
        return tokenize(text, images=images)

    monkeypatch.setattr(FakePreprocessor, "tokenize", noted)
    sent = chat(logit_bias={"5": -100, "3": 1.5}, bad_words=["no", "never"])
    sampling = (await accepted(CHAT, sent)).sampling
    assert dict(sampling.logit_bias) == {5: -100.0, 3: 1.5}
    forbidden = {tuple(tokenize(text)) for text in ("no", " no", "never", " never")}
    assert set(sampling.bad_words) == forbidden
    assert threads
    assert threading.get_ident() not in threads


NEUTRAL: dict[str, Any] = {
    "n": 1, "logit_bias": {}, "response_format": {"type": "text"}, "user": "someone", "metadata": {"a": "b"},
    "stream_options": None, "use_beam_search": False, "length_penalty": 1.0,
    "truncate_prompt_tokens": None, "include_reasoning": True, "documents": [], "kv_transfer_params": {},
    "thinking_token_budget": -1, "no_stop_trim": False, "separate_reasoning": True, "return_hidden_states": False,
    "custom_params": {}, "routed_dp_rank": None, "echo": False, "request_id": "mine", "rid": "mine",
    "custom_labels": {"team": "a"},
}  # fmt: skip
"""Fields of other servers and values of them that change nothing."""


async def test_fields_that_change_nothing_are_accepted() -> None:
    of_chats = {
        "store": False, "service_tier": "auto", "tools": [], "tool_choice": "auto",
        "modalities": ["text"], "parallel_tool_calls": True, "reasoning_effort": "low",
    }  # fmt: skip
    await accepted(CHAT, chat(**NEUTRAL, **of_chats))
    await accepted(PLAIN, body_of(PLAIN, **NEUTRAL, suffix=None))
