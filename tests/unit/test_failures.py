"""Messages for processes that ended while they started."""

from __future__ import annotations

import signal

from vsched.failures import ProcessExited

LIMIT = (400 << 20, "encode.memory_limit")


def test_process_exited_while_serving_says_the_signal_alone() -> None:
    failure = ProcessExited(("encode",), 0, -signal.SIGABRT)
    assert str(failure) == "encode: rank 0 was killed by SIGABRT"


def test_process_exited_while_starting_names_phase_limit_and_setting() -> None:
    for code in (-signal.SIGABRT, -signal.SIGSEGV, 1):
        words = ProcessExited(("encode",), 0, code, doing="loading", memory_limit=LIMIT).words
        assert "it was last loading, under a memory limit of 419430400 bytes" in words
        assert "Remedy: raise encode.memory_limit;" in words


def test_process_exited_while_starting_without_a_limit_blames_no_setting() -> None:
    words = ProcessExited(("encode",), 0, -signal.SIGSEGV, doing="loading").words
    assert words == "rank 0 was killed by SIGSEGV; it was last loading"


def test_process_killed_while_starting_is_not_told_to_take_more_memory() -> None:
    """SIGKILL means that the host ran out of memory: a higher limit would make that worse."""
    failure = ProcessExited(("encode",), 0, -signal.SIGKILL, doing="loading", memory_limit=LIMIT)
    assert "raise" not in failure.words
    assert "Remedy: free memory there, or lower" in failure.words
