from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, body_of, chat, post
from vsched.api import ApiSettings
from vsched.types import SamplingDefaults


@each_case(
    ("prompt", "expected"),
    [("ab", "ab"), (["ab"], "ab"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
async def test_plain_completion_prompt_forms(prompt: object, expected: object) -> None:
    engine = FakeEngine()
    assert (await post(engine, PLAIN, {"prompt": prompt})).status == 200
    assert engine.calls[0]["prompt"] == expected


@each_case(
    "prompt",
    [[], [[]], [1, "a"], [256], [[1], [2, 256]], [-1], [[1], []], ["x", 1], ["x", [1]], [[1], 2]],
)
async def test_plain_completion_refuses_other_prompts(prompt: object) -> None:
    reply = await post(FakeEngine(), PLAIN, {"prompt": prompt})
    assert reply.status == 400
    assert reply.error["param"].startswith("prompt")
    assert "Remedy" in reply.error["message"]


async def test_every_sampling_field_arrives() -> None:
    engine = FakeEngine()
    fields = {
        "max_completion_tokens": 5,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "stop": "END",
        "include_stop_str_in_output": True,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
        "priority": -4,
        "ttft_target_ms": 250,
        "cache_salt": "tenant",
    }
    assert (await post(engine, CHAT, chat(**fields))).status == 200
    assert msgspec.to_builtins(engine.sampling) == {
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 2**63 - 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "stop": ("END",),
        "include_stop": True,
        "stop_token_ids": (5,),
        "ignore_eos": True,
        "show_special": False,
        "logprobs": 3,
        "prompt_logprobs": None,
        "prompt_only": False,
        "logit_bias": (),
        "bad_words": (),
        "grammar": "",
    }
    assert engine.calls[0]["ttft_target_ms"] == 250
    assert (engine.calls[0]["priority"], engine.calls[0]["cache_salt"]) == (-4, "tenant")


async def test_absent_sampling_fields_take_defaults() -> None:
    engine = FakeEngine()
    await post(engine, CHAT, chat(top_k=-1, temperature=None, stop=None))
    first = engine.sampling
    assert (first.max_tokens, first.temperature, first.top_k, first.stop) == (0, 1.0, 0, ())
    assert first.logprobs is None
    await post(engine, CHAT, chat())
    assert engine.sampling.seed != first.seed


async def test_absent_sampling_fields_are_as_the_checkpoint_states() -> None:
    """A field of the request wins, even if it disables something."""
    engine = FakeEngine()
    stated: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    engine.preprocessor.info = msgspec.structs.replace(
        engine.info, sampling=SamplingDefaults(**stated)
    )
    await post(engine, CHAT, chat())
    assert stated.items() <= msgspec.to_builtins(engine.sampling).items()
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    await post(engine, CHAT, chat(**given))
    assert given.items() <= msgspec.to_builtins(engine.sampling).items()
    await post(engine, CHAT, chat(top_k=-1))
    assert (engine.sampling.top_k, engine.sampling.temperature) == (0, 0.6)


OUT_OF_BOUNDS: dict[str, list[object]] = {
    "n": [0, True, 129],
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.01],
    "top_k": [-2],
    "min_p": [1.5],
    "repetition_penalty": [0],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "max_tokens": [0, 1001],
    "max_completion_tokens": [-1],
    "min_tokens": [1001, -1],
    "seed": [2**63, 1.5],
    "stop": [[""], ["x"] * 17, "x" * 257],
    "stop_token_ids": [[256], [1] * 65, [-1]],
    "top_logprobs": [5],
    "priority": [2**40],
    "cache_salt": ["x" * 257],
    "stream": ["yes"],
    "messages": [
        *([], "hello", [{"role": "user", "content": "x"}] * 1025),
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "video_url"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}],
    ],
    "chat_template_kwargs": [{"tools": "x"}, {"enable_thinking": []}],
}


@each_case(
    ("field", "value"),
    [(field, value) for field, values in OUT_OF_BOUNDS.items() for value in values],
)
async def test_parameters_out_of_bounds_are_refused(field: str, value: object) -> None:
    """A 400 in OpenAI's form that names the parameter, before the request reaches the engine."""
    engine = FakeEngine()
    reply = await post(engine, CHAT, chat(**{field: value}))
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    names = {field, "logprobs", "max_tokens"}
    assert any(reply.error["param"].startswith(name) for name in names)
    assert "Remedy" in reply.error["message"]
    assert engine.calls == []


@each_case("path", [CHAT, PLAIN])
async def test_logprobs_of_the_whole_vocabulary_need_the_setting(path: str) -> None:
    """-1 means the size of the vocabulary."""
    engine = FakeEngine()
    whole = (
        chat(logprobs=True, top_logprobs=-1) if path == CHAT else {"prompt": "x", "logprobs": -1}
    )
    reply = await post(engine, path, whole)
    assert reply.status == 400
    assert (
        "value 256, limit 20. Remedy: ask for fewer or raise server.logprobs_max"
        in (reply.error["message"])
    )
    assert (await post(engine, path, whole, ApiSettings(logprobs_max=256))).status == 200
    assert engine.sampling.logprobs == 256


@each_case(
    ("fields", "tokens"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 40}, 40), ({"min_tokens": 20}, 20)],
)
async def test_plain_completions_have_16_tokens_by_default(
    fields: dict[str, Any], tokens: int
) -> None:
    """As in OpenAI's and vLLM's; chats have no such default."""
    engine = FakeEngine()
    assert (await post(engine, PLAIN, {"prompt": "x", **fields})).status == 200
    assert engine.sampling.max_tokens == tokens


_UNSERVED_PARTS = "input_audio audio_url input_video file input_file document"


@each_case("kind", _UNSERVED_PARTS.split())
async def test_parts_that_are_not_served_are_refused_by_their_name(kind: str) -> None:
    sent = chat(messages=[{"role": "user", "content": [{"type": kind, kind: {"data": ""}}]}])
    reply = await post(FakeEngine(), CHAT, sent)
    assert reply.status == 400
    place = "messages[0].content[0].type"
    assert reply.error["message"].startswith(f'`{place}` "{kind}" is not supported. Remedy: send')
    assert (reply.error["param"], reply.error["code"]) == (place, "unsupported_parameter")


async def test_custom_tools_are_refused_by_their_name() -> None:
    custom = {"type": "custom", "custom": {"name": "f", "input": "x"}}
    calls = [{"role": "assistant", "tool_calls": [{"id": "1", **custom}]}]
    function = {"type": "function", "function": {"name": "g"}}
    for place, fields in (
        ("tools[0]", {"tools": [custom]}),
        ("tool_choice", {"tools": [function], "tool_choice": custom}),
        ("messages[0].tool_calls[0]", {"messages": calls}),
    ):
        reply = await post(FakeEngine(), CHAT, chat(**fields))
        assert reply.error["message"].startswith(f'`{place}.type` "custom" is not supported.')


async def test_biases_and_bad_words_reach_the_engine() -> None:
    """A bad word is forbidden at the start of a text and after a space."""
    engine = FakeEngine()
    reply = await post(engine, CHAT, chat(logit_bias={"5": -100, "3": 1.5}, bad_words=["no"]))
    assert reply.status == 200
    sampling = engine.calls[0]["sampling"]
    assert dict(sampling.logit_bias) == {5: -100.0, 3: 1.5}
    tokenize = engine.preprocessor.tokenize
    assert set(sampling.bad_words) == {tuple(tokenize(text)) for text in ("no", " no")}


async def test_bad_words_are_tokenized_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    threads: set[int] = set()
    tokenize = engine.preprocessor.tokenize

    def noted(text: str, *, images: bool = True) -> list[int]:
        threads.add(threading.get_ident())
        return tokenize(text, images=images)

    monkeypatch.setattr(engine.preprocessor, "tokenize", noted)
    assert (await post(engine, CHAT, chat(bad_words=["no", "never"]))).status == 200
    assert threads
    assert threading.get_ident() not in threads


@each_case(
    "fields",
    [
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {str(10**9): 1}},
        {"logit_bias": {str(token): 0 for token in range(1025)}},
        {"bad_words": [""]},
        {"bad_words": ["a"] * 65},
    ],
)
async def test_biases_and_bad_words_have_limits(fields: dict[str, Any]) -> None:
    reply = await post(FakeEngine(), CHAT, chat(**fields))
    assert reply.status == 400
    assert next(iter(fields)) in reply.error["param"]


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
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "auto",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }
    assert (await post(FakeEngine(), CHAT, chat(**NEUTRAL, **of_chats))).status == 200
    assert (await post(FakeEngine(), PLAIN, body_of(PLAIN, **NEUTRAL, suffix=None))).status == 200


@each_case(
    ("fields", "limit"),
    [
        ({"use_beam_search": True}, "value true, limit false"),
        ({"length_penalty": 0.5}, "value 0.5, limit 1"),
        ({"length_penalty": True}, "value true, limit 1"),
        ({"thinking_token_budget": 100}, "value 100, limit -1"),
        ({"documents": [{"text": "x"}]}, "value a list, limit []"),
        ({"custom_params": {"x": "y" * 100}}, "value an object, limit {}"),
        ({"chat_template": "x" * 100}, 'value a text of 100 characters, limit ""'),
        ({"regex": "a+"}, 'value "a+", limit null'),
    ],
)
@each_case("path", [CHAT, PLAIN])
async def test_fields_of_other_servers_are_refused_where_they_would_change_something(
    path: str, fields: dict[str, Any], limit: str
) -> None:
    """With value, limit and remedy, before the request reaches the engine."""
    engine = FakeEngine()
    reply = await post(engine, path, body_of(path, **fields))
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert reply.error["param"] in fields
    assert f"{limit}. Remedy: " in reply.error["message"]
    assert engine.calls == []


@each_case(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"x"', b'{"user":' + b"[" * 100_000, b'{"a":1}{}'],
)
async def test_body_that_is_no_request_is_refused(body: bytes) -> None:
    reply = await post(FakeEngine(), CHAT, body)
    assert reply.status == 400
    assert "0x" not in reply.error["message"]


USAGE = {"stream_options": {"include_usage": True}}


@each_case(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"messages": 0}, "messages", "is of the wrong type: value 0, limit a list. Remedy: send a list."),
        (CHAT, {"max_tokens": 2.0}, "max_tokens", ("is of the wrong type: value 2.0, limit an integer. "
         "Remedy: send an integer, which has no decimal point.")),
        (CHAT, {"messages": [{"role": "wizard"}]}, "messages[0].role", ('is no role: value "wizard", limit system, '
         "developer, user, assistant, tool or function. Remedy: send one of these.")),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "is missing. Remedy: send it."),
        (CHAT, {"temperature": 3.5}, "temperature", "is out of bounds: value 3.5, limit <= 2.0. Remedy: send a"),
        (CHAT, {"seed": 2**80}, "seed", (f"is out of bounds: value {2**80}, limit <= 9223372036854775807. "
         "Remedy: send a value within the limit.")),
        (CHAT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "value 4, limit 3 (max_tokens)"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs", "value 21, limit 20"),
        (CHAT, {"logit_bias": {"5": 1, "twelve": 1}}, "logit_bias", 'value the key "twelve", limit'),
        (CHAT, {"logit_bias": {"256": 1}}, "logit_bias", "out of vocabulary: value 256, limit below 256,"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
         "Remedy: send add_generation_prompt = false"),
        # As in OpenAI's API: a client that waits for usage in a stream has forgotten `stream`.
        (CHAT, USAGE, "stream_options", "needs a stream"),
        (PLAIN, USAGE, "stream_options", "needs a stream"),
        (CHAT, {"temprature": 0}, "temprature", "is not a known parameter"),
        *(
            (CHAT, {name: value}, name, "is not supported with this value")
            for name, value in {
                "best_of": 3, "functions": [{}], "function_call": {"name": "f"}, "audio": {},
                "modalities": ["text", "audio"], "prediction": {"type": "content"}, "web_search_options": {},
            }.items()
        ),
        (PLAIN, {"prompt_embeds": "x"}, "prompt_embeds", "is not supported with this value"),
        (PLAIN, {"suffix": "y"}, "suffix", ('is not supported with this value: value "y", limit "". '
         "Remedy: leave it out; the models served here only write on from a prompt.")),
    ],
)  # fmt: skip
async def test_refusals_name_the_parameter_value_and_limit(
    path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    body = body_of(path, **fields)
    reply = await post(FakeEngine(), path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert f"`{param}`" in reply.error["message"]
    assert message in reply.error["message"]
    codes = {"is not a known": "unknown_parameter", "is not supp": "unsupported_parameter"}
    code = next((codes[each] for each in codes if message.startswith(each)), "invalid_value")
    assert reply.error["code"] == code


@each_case("path", [CHAT, PLAIN, "/tokenize"])
async def test_wrong_value_next_to_what_is_no_text_is_refused(path: str) -> None:
    """Parts that msgspec skips are not checked until the value appears in an error."""
    name = "prompt" if path == PLAIN else "messages"
    reply = await post(FakeEngine(), path, b'{"%s":0,"\xff":1}' % name.encode())
    assert (reply.status, reply.error["param"]) == (400, name)


async def test_error_texts_do_not_quote_long_content() -> None:
    """A data URL in the wrong field is not repeated in the error."""
    url = "data:image/png;base64," + "A" * 10_000
    content = [{"type": url}]
    reply = await post(FakeEngine(), CHAT, chat(messages=[{"role": "user", "content": content}]))
    assert len(reply.error["message"]) < 500
    assert "AAAA" not in reply.error["message"]


@each_case(
    ("fields", "prompt"),
    [
        ({"add_generation_prompt": True}, "user:hi"),
        ({"add_generation_prompt": False}, "add_generation_prompt=False;user:hi"),
        (
            {"continue_final_message": True},
            "continue_final_message=True;add_generation_prompt=False;user:hi",
        ),
    ],
)
@each_case("path", [CHAT, "/tokenize"])
async def test_prompt_may_go_on_with_the_last_message(
    path: str, fields: dict[str, Any], prompt: str
) -> None:
    engine = FakeEngine()
    reply = await post(engine, path, chat(**fields))
    assert reply.status == 200
    if path == CHAT:
        assert engine.calls[0]["prompt"] == prompt
    else:
        assert reply.json["count"] == len(prompt)


async def test_template_arguments_are_passed_from_the_allow_list() -> None:
    engine = FakeEngine()
    await post(engine, CHAT, chat(chat_template_kwargs={"enable_thinking": False}))
    assert engine.calls[0]["prompt"] == "enable_thinking=False;user:hi"


@each_case(("key", "session"), [("talk-7", "talk-7"), (None, ""), (5, "")])
async def test_prompt_cache_key_names_the_session(key: object, session: str) -> None:
    engine = FakeEngine()
    await post(engine, CHAT, chat(prompt_cache_key=key))
    assert engine.calls[0]["session"] == session
