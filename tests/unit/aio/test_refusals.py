"""Errors for refused requests give the event, the value, the limit and the remedy."""

from __future__ import annotations

import pytest

from vsched.aio.arrivals import refusal_error
from vsched.kernel.commands import RefusalCode, Refuse


@pytest.mark.parametrize("code", RefusalCode)
def test_refusal_of_every_code_has_words(code: RefusalCode) -> None:
    error = refusal_error(
        Refuse("r", code, 3, 2, "generate.some_key", detail=(4, 5), reason="it is gone")
    )
    assert error.code == code.value
    assert error.message.count(". Remedy: ") == 1
    assert error.message.endswith(".")
    assert (error.status == 429) == (error.retry_after_s is not None)


def test_refusal_names_the_setting_that_was_reached() -> None:
    for setting, words in {
        "generate.max_waiting": "too many requests wait",
        "generate.max_waiting_bytes": "the requests that wait hold too many bytes",
    }.items():
        error = refusal_error(Refuse("r", RefusalCode.QUEUE_FULL, 3, 2, setting))
        assert error.message == (
            f"{words}: value 3, limit 2. Remedy: try again later, or raise {setting}."
        )
