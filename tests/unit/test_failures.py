"""Messages for processes that ended while they started."""

from __future__ import annotations

import signal

import pytest

from vsched.failures import ProcessExited

LIMIT = (400 << 20, "encode.memory_limit")
LACKS = (
    "it was last loading, under a memory limit of 419430400 bytes",
    "Remedy: raise encode.memory_limit;",
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGABRT, LACKS),
        (-signal.SIGSEGV, LACKS),
        (1, LACKS),
        # The host ran out of memory: a higher limit would make that worse.
        (-signal.SIGKILL, ("Remedy: free memory there, or lower",)),
    ],
)
def test_process_that_exited_names_phase_limit_and_key(code: int, words: tuple[str, ...]) -> None:
    failure = ProcessExited(("encode",), 0, code, doing="loading", memory_limit=LIMIT)
    assert all(each in failure.words for each in words)
    assert ("raise" in failure.words) == (words is LACKS)


def test_process_exited_without_a_limit_or_while_serving_blames_no_setting() -> None:
    failure = ProcessExited(("encode",), 0, -signal.SIGABRT)
    assert str(failure) == "encode: rank 0 was killed by SIGABRT"
    words = ProcessExited(("encode",), 0, -signal.SIGSEGV, doing="loading").words
    assert words == "rank 0 was killed by SIGSEGV; it was last loading"
