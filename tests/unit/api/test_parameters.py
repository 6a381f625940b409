"""Fields of requests: values in the engine, and errors with parameter, value, limit and remedy."""

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
        (PLAIN, {"max_tokens": 10**6}, {"max_tokens": 1000}),
        (PLAIN, {"min_tokens": 20}, {"max_tokens": 20}),
        (CHAT, {"top_k": -1, "temperature": None, "stop": None}, DEFAULTS),
        (CHAT, {"skip_special_tokens": True}, {"show_special": False}),
        (CHAT, {"skip_special_tokens": False}, {"show_special": True}),
        (PLAIN, {"skip_special_tokens": False}, {"show_special": True}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}},
            {"prompt": "enable_thinking=False;user:hi"}),
        (CHAT, {"chat_template_kwargs": {"date_string": "today"}},
            {"prompt": "date_string=today;user:hi"}),
        (CHAT, {"reasoning_effort": "none"}, {"prompt": "reasoning_effort=none;"
            "enable_thinking=False;thinking=False;user:hi"}),
        (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            {"prompt": "reasoning_effort=low;enable_thinking=True;thinking=False;user:hi"}),
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
    "stop_token_ids": [5] * 99, "ignore_eos": True, "logprobs": True, "top_logprobs": 3,
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


FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def said(*parts: object) -> dict[str, Any]:
    """The field of a chat with these content parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def called(arguments: str, name: str = "f", role: str = "assistant") -> dict[str, Any]:
    """The field of a chat with a tool call in its history."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": role, "content": None, "tool_calls": [call]}]}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": True, **fields}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


OUTSIDE: dict[str, list[object]] = {
    "n": [0, True, 129],
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.01],
    "top_k": [-2],
    "min_p": [1.5],
    "repetition_penalty": [0],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "max_tokens": [0],
    "max_completion_tokens": [-1],
    "min_tokens": [1001, -1],
    "seed": [2**63, 1.5],
    "stop": [[""], ["x"] * 17, "x" * 257],
    "stop_token_ids": [[256], [-1]],
    "top_logprobs": [5],
    "priority": [2**40],
    "cache_salt": ["x" * 257],
    "stream": ["yes"],
    "messages": [
        *([], "hello", [{"role": "user", "content": "x"}] * 1025),
        said({"type": "video_url"})["messages"],
        said(*[{"type": "text", "text": "x"}] * 4097)["messages"],
    ],
    "chat_template_kwargs": [{"tools": "x"}, {"enable_thinking": []}, {"date_strin": "x"}],
    "reasoning_effort": ["a lot", 3],
    "logit_bias": [{"5": 101}, {"x": 1}, {"-1": 1}, {str(token): 0 for token in range(1025)}],
    "bad_words": [[""], ["a"] * 65],
    "guided_json": ["{", "[]"],
    "guided_choice": [[], [""]],
    "guided_whitespace_pattern": [" "],
    "response_format": [
        *({"type": "xml"}, {"type": "json_schema"}, {}),
        *(
            {"type": "json_schema", "json_schema": {"name": "n", "schema": each}}
            for each in (None, 3)
        ),
    ],
    "structured_outputs": [{"structural_tag": {}}, {"whitespace_pattern": " "}],
    "prompt": [
        *([], [[]], [1, "a"], [256], [[1], [2, 256]], [-1], [[1], []], ["x", 1], ["x", [1]]),
        [[1], 2],
    ],
}


@each_case(("field", "value"), [(name, one) for name, values in OUTSIDE.items() for one in values])
async def test_parameters_out_of_bounds_are_refused(field: str, value: object) -> None:
    path = PLAIN if field == "prompt" else CHAT
    error = await refusal(path, body_of(path, **{field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)


UNSERVED_PARTS = ("input_audio", "audio_url", "input_video", "file", "input_file", "document")
USAGE = {"stream_options": {"include_usage": True}}
OF_OTHER_SERVERS: list[tuple[dict[str, Any], str]] = [
    ({"use_beam_search": True}, "value true, limit false"),
    ({"length_penalty": 0.5}, "value 0.5, limit 1"),
    ({"length_penalty": True}, "value true, limit 1"),
    ({"thinking_token_budget": 100}, "value 100, limit -1"),
    ({"documents": [{"text": "x"}]}, "value a list, limit []"),
    ({"custom_params": {"x": "y" * 100}}, "value an object, limit {}"),
    ({"chat_template": "x" * 100}, 'value a text of 100 characters, limit ""'),
    ({"regex": "a+"}, 'value "a+", limit null'),
]
"""Fields that would change something, for which they are refused."""


@each_case(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"messages": 0}, "messages",
         "is of the wrong type: value 0, limit a list. Remedy: send a list."),
        (CHAT, {"max_tokens": 2.0}, "max_tokens", ("is of the wrong type: value 2.0, limit an "
         "integer. Remedy: send an integer, which has no decimal point.")),
        (CHAT, {"messages": [{"role": "wizard"}]}, "messages[0].role",
         ('is no role: value "wizard", limit system, developer, '
          "user, assistant, tool or function. Remedy: send one of these.")),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role",
         "is missing. Remedy: send it."),
        (CHAT, {"temperature": 3.5}, "temperature",
         "is out of bounds: value 3.5, limit <= 2.0. Remedy: send a"),
        (CHAT, {"seed": 2**80}, "seed", (f"is out of bounds: value {2**80}, limit <= "
         "9223372036854775807. Remedy: send a value within the limit.")),
        (CHAT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "value 4, limit 3 (max_tokens)"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs", "value 21, limit 20"),
        (CHAT, {"logit_bias": {"5": 1, "twelve": 1}}, "logit_bias",
         'value the key "twelve", limit'),
        (CHAT, {"logit_bias": {"256": 1}}, "logit_bias",
         "out of vocabulary: value 256, limit below 256,"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "Remedy: send add_generation_prompt = false"),
        # As in OpenAI's API: a client that waits for usage in a stream has forgotten `stream`.
        (CHAT, USAGE, "stream_options", "needs a stream"),
        (PLAIN, USAGE, "stream_options", "needs a stream"),
        (CHAT, {"temprature": 0}, "temprature", "is not a known parameter"),
        *(
            (CHAT, {name: value}, name, "is not supported with this value")
            for name, value in {
                "best_of": 3, "functions": [{}], "function_call": {"name": "f"}, "audio": {},
                "modalities": ["text", "audio"], "prediction": {"type": "content"},
                "web_search_options": {},
            }.items()
        ),
        *(
            (path, fields, next(iter(fields)), f"is not supported with this value: {limit}. Remedy: ")
            for path in (CHAT, PLAIN)
            for fields, limit in OF_OTHER_SERVERS
        ),
        (PLAIN, {"prompt_embeds": "x"}, "prompt_embeds", "is not supported with this value"),
        (PLAIN, {"suffix": "y"}, "suffix",
         ('is not supported with this value: value "y", limit "". '
         "Remedy: leave it out; the models served here only write on from a prompt.")),
        *(
            (CHAT, said({"type": kind, kind: {"data": ""}}), "messages[0].content[0].type",
             f'"{kind}" is not supported. Remedy: send')
            for kind in UNSERVED_PARTS
        ),
        (CHAT, said({"type": "movie"}), "messages[0].content[0].type",
         "text, image_url, video_url, video, image_embeds, video_embeds, refusal or thinking"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type",
         '"custom" is not supported.'),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
         "tool_choice.type", '"custom" is not supported.'),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]},
         "messages[0].tool_calls[0].type", '"custom" is not supported.'),
        # Two constraints of one output.
        (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", ""),
        (CHAT, {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex", ""),
        # Prompt log-probabilities, and prompts alone.
        (PLAIN, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", ""),
        (PLAIN, {"prompt_logprobs": 21}, "prompt_logprobs", ""),
        (PLAIN, {"prompt_logprobs": -1}, "prompt_logprobs", ""),
        # No choice for `best_of` to make.
        (PLAIN, {"n": 3, "best_of": 2}, "best_of", ""),
        (PLAIN, {"best_of": 2, "stream": True}, "best_of", ""),
        # Arguments of image processors.
        (CHAT, {"mm_processor_kwargs": {"seconds": 2}}, "seconds", ""),
        (CHAT, {"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels", ""),
        (CHAT, {"mm_processor_kwargs": {"size": {"height": 3}}}, "height", ""),
        # Tools, choices of them, and calls in a history.
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].type", ""),
        (CHAT, {"tools": [function("a b")]}, "tools[0].function.name", ""),
        (CHAT, {"tools": [function(""), function("g")]}, "tools[0].function.name", ""),
        (CHAT, {"tools": [function("f"), function("f")]}, "tools[1].function.name", ""),
        (CHAT, {"tools": [function(parameters={"type": "string"})]},
         "tools[0].function.parameters.type", ""),
        (CHAT, {"tools": [function(parameters=[1])]}, "tools[0].function.parameters", ""),
        (CHAT, {"tools": [function(parameters=nested(200))]}, "tools[0].function.parameters", ""),
        (CHAT, {"tools": [function(str(index)) for index in range(129)]}, "tools", ""),
        (CHAT, {"tool_choice": "required"}, "tool_choice", ""),
        (CHAT, {"tool_choice": FUNCTION}, "tool_choice", ""),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "f"}, "tool_choice", ""),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice", ""),
        (CHAT, {"tools": [FUNCTION], "tool_choice": function("h")}, "tool_choice", ""),
        (CHAT, called('{"a":' * 40 + "1" + "}" * 40),
         "messages[0].tool_calls[0].function.arguments", "limit"),
        (CHAT, called("{}", name="<|im_end|>"), "messages[0].tool_calls[0].function.name", "limit"),
        (CHAT, called("{}", role="user"), "messages[0].tool_calls", "limit"),
    ],
)  # fmt: skip
async def test_refusals_name_the_parameter_value_and_limit(
    path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = await refusal(path, body_of(path, **fields))
    assert error["param"] == param
    assert message in error["message"]
    if message:
        assert f"`{param}`" in error["message"]
        codes = {"not a known": "unknown_parameter", "not supported": "unsupported_parameter"}
        code = next((codes[each] for each in codes if each in message), "invalid_value")
        assert error["code"] == code


@each_case(
    "value",
    [
        *(None, "data", [], {}, {"data": 5}, {"data": ["A" * 5000]}, {"url": "A" * 5000}),
        *({"data": "AAAA", "url": "data:,AAAA"}, {"data": ""}, {"url": None}),
    ],
)
async def test_misshapen_embedding_is_refused_without_quoting_it(value: object) -> None:
    for name in ("image_embeds", "video_embeds"):
        error = await refusal(CHAT, chat(**said({"type": name, name: value})))
        assert name in error["message"] or error["code"] == "unknown_parameter"
        assert "AAAA" not in error["message"]


@each_case(
    "fields", [{}, {"image_url": {}}, {"image_url": None}, {"uuid": ""}, {"uuid": "x" * 257}]
)
async def test_image_without_url_and_name_is_refused(fields: dict[str, object]) -> None:
    await refusal(CHAT, chat(**said({"type": "image_url", **fields})))


async def test_refusals_do_not_quote_long_content() -> None:
    """A data URL in the wrong field is not repeated in the error."""
    error = await refusal(CHAT, chat(**said({"type": "data:image/png;base64," + "A" * 10_000})))
    assert len(error["message"]) < 500
    assert "AAAA" not in error["message"]


@each_case("path", [CHAT, PLAIN, "/tokenize"])
async def test_wrong_value_next_to_a_value_that_is_no_text_is_refused(path: str) -> None:
    """Parts that msgspec skips are not checked until the value appears in an error."""
    name = "prompt" if path == PLAIN else "messages"
    error = await refusal(path, b'{"%s":0,"\xff":1}' % name.encode())
    assert error["param"] == name


@each_case("path", [CHAT, "/v1/messages", "/admin/replicas", "/admin/policies"])
@each_case(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"x"', b'{"user":' + b"[" * 100_000, b'{"a":1}{}'],
)
async def test_body_that_is_no_request_is_refused(path: str, body: bytes) -> None:
    reply = await post(FakeEngine(), path, body)
    assert reply.status == 400
    assert "0x" not in reply.json["error"]["message"]


async def test_invalid_operations_are_refused_and_change_nothing() -> None:
    engine = FakeEngine()
    for body in ({}, {"group": "generate-1"}, {"group": 1, "action": "drain"}):
        assert (await post(engine, "/admin/replicas", body)).status == 400
    tables = {"generate.step": "tenant-fair"}
    assert (await post(engine, "/admin/policies", tables)).status == 400
    assert (engine.actions, engine.tables["generate.step"]) == ([], {"use": "in-order"})
