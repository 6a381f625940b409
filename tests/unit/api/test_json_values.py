from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.api.fakes import FakeEngine, chat, post
from vsched.api import json_values, parameters
from vsched.api.json_values import count_values

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,[{é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


def marks(value: Any) -> int:
    """The brackets and braces that open, and the commas, of a value."""
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + sum(map(marks, value.values()))
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(marks, value))
    return 0


@given(value=VALUES, size=st.integers(1, 9))
def test_count_sees_no_text(value: Any, size: int) -> None:
    """Whatever stands in strings, and wherever the slices lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_SLICE_BYTES", size)
        assert count_values(json.dumps(value).encode(), 10**9) == marks(value)


BODIES = {
    "/v1/completions": b'{"metadata":[%s],"prompt":"x"}',
    "/v1/chat/completions": b'{"messages":[%s]}',
    "/tokenize": b'{"messages":[%s]}',
    "/admin/replicas": b'{"group":1,"action":[%s]}',
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_a_body_of_many_values_is_refused_before_it_is_decoded(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "decode_body", None)
    reply = await post(FakeEngine(), path, body % b",".join([b"[]"] * 150_000))
    assert (reply.status, reply.error["code"]) == (413, "too_many_values")
    limit = 131072 if path.startswith("/admin/") else 132072  # operators send no tokens
    assert f"limit {limit}" in reply.error["message"]


async def test_a_body_of_escapes_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_values, "ESCAPES_MAX", 200_000)
    text = "\n" * 210_000
    assert (await post(FakeEngine(), "/v1/chat/completions", chat(user=text))).status == 200
    monkeypatch.setattr(parameters, "decode_body", None)
    reply = await post(FakeEngine(), "/v1/chat/completions", chat(user=text + "\n" * 10_000))
    assert (reply.status, reply.error["code"]) == (413, "too_many_values")
    assert "limit 216000" in reply.error["message"]


async def test_a_text_full_of_commas_is_no_list() -> None:
    text = ',[{"\\' * 80_000
    reply = await post(FakeEngine(), "/v1/chat/completions", chat(metadata={"note": text}))
    assert reply.status == 200
