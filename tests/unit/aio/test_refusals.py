"""Refused requests: numbers that would break the wire or a rank, and errors with event, value, limit and remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vsched.aio.arrivals import check_numbers, check_prompt_values, checked_prompt, refusal_error
from vsched.errors import RequestRefused
from vsched.kernel.commands import RefusalCode, Refuse
from vsched.types import SamplingParams


@pytest.mark.parametrize("code", RefusalCode)
def test_refusal_of_every_code_has_words(code: RefusalCode) -> None:
    error = refusal_error(Refuse("r", code, 3, 2, "some.key", detail=(4, 5), reason="it is gone"))
    assert error.code == code.value
    assert error.message.count(". Remedy: ") == 1
    assert error.message.endswith(".")
    assert (error.status == 429) == (error.retry_after_s is not None)


VOCABULARY = 100
INT32_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1


PROMPT, STOP_TOKEN = "a token id of the prompt", "a stop token id"


@pytest.mark.parametrize(
    ("name", "limit", "values"),
    [
        (PROMPT, "0 to 99", [-1, 100, 2**31]),
        ("the length of a stop string", f"1 to {INT32_MAX}", [0]),
        (STOP_TOKEN, "0 to 99", [100, -1, 2**70]),
        ("seed", f"{-SEED_MAX - 1} to {SEED_MAX}", [2**63, -(2**70)]),
        ("max_tokens", f"0 to {INT32_MAX}", [2**31, -1]),
        ("min_tokens", f"0 to {INT32_MAX}", [2**31, -1]),
        ("top_k", f"-1 to {INT32_MAX}", [2**31, -2]),
        ("logprobs", "0 to 100", [101, -1]),
        ("temperature", "0 to 1000000.0", [math.nan, math.inf, -0.1]),
        ("top_p", "0 to 1", [1.1, math.nan]),
        ("min_p", "0 to 1", [-0.1]),
        ("repetition_penalty", "0.001 to 1000.0", [math.inf]),
        ("presence_penalty", "-1000000.0 to 1000000.0", [math.nan]),
        ("frequency_penalty", "-1000000.0 to 1000000.0", [-math.inf]),
    ],
)
def test_check_numbers_refuses(name: str, limit: str, values: list[Any]) -> None:
    for value in values:
        token_ids, sampling = [1, 2], {name: value}
        if name == PROMPT:
            token_ids, sampling = [1, value, 2], {}
        elif name == STOP_TOKEN:
            sampling = {"stop_token_ids": (1, value)}
        elif name == "the length of a stop string":
            sampling = {"stop": ("x", "")}
        with pytest.raises(RequestRefused) as caught:
            check_numbers(token_ids, SamplingParams(**sampling), vocab_size=VOCABULARY)
        assert (
            caught.value.message == f"{name} is out of bounds: value {value}, limit {limit}. "
            "Remedy: send a value within the limit."
        )
        assert (caught.value.code, caught.value.status) == ("invalid_value", 400)


@pytest.mark.parametrize(
    ("token_ids", "sampling"),
    [
        ([], {}),
        ([0, 99], {"stop_token_ids": (0, 99)}),
        ([1], {"seed": SEED_MAX, "max_tokens": INT32_MAX, "min_tokens": INT32_MAX}),
        ([1], {"seed": 0, "max_tokens": 0, "top_k": -1, "top_p": 0, "min_p": 1}),
        ([1], {"temperature": 0, "logprobs": 0}),
        ([1], {"temperature": 1e6, "logprobs": 100, "presence_penalty": -2}),
    ],
    ids=str,
)
def test_check_numbers_accepts_the_limits_themselves(
    token_ids: list[int], sampling: dict[str, Any]
) -> None:
    check_numbers(token_ids, SamplingParams(**sampling), vocab_size=VOCABULARY)


def test_prompt_values_are_as_many_as_the_setting_says() -> None:
    check_prompt_values(6, 6)
    with pytest.raises(RequestRefused, match=r"value 7, limit 6\. .*server\.prompt_logprobs_max"):
        check_prompt_values(7, 6)


def test_checked_prompt_keeps_the_class_of_a_text() -> None:
    """A rendered prompt marks positions where special tokens are a client's text, not the template's."""

    class Rendered(str):
        marks = (3,)

    rendered = Rendered("<s>")
    assert checked_prompt(rendered) is rendered
