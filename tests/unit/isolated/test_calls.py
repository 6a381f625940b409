"""Isolated calls: if the process of one call dies, the others still get their replies."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S
from tests.unit.isolated import shaky_server
from vsched.isolated.calls import CallFailedError, IsolatedCalls, ServerClosedError, ServerLostError


def shaky() -> IsolatedCalls:
    return IsolatedCalls(
        shaky_server.__name__, b"setup and ", name="shaky", failure="it failed", code="failed"
    )


@pytest.fixture(scope="module")
def calls() -> Iterator[IsolatedCalls]:
    """A server shared by most tests: a failed call must not affect later ones."""
    with contextlib.closing(shaky()) as made:
        yield made


@pytest.fixture
def fresh() -> Iterator[IsolatedCalls]:
    """A server that has not started."""
    with contextlib.closing(shaky()) as made:
        yield made


def call(calls: IsolatedCalls, order: str, deadline_s: float = PATIENCE_S, **options: Any) -> str:
    return calls.call(order.encode(), answer_type=str, deadline_s=deadline_s, **options)


def test_calls_answer_and_know_the_setup_until_they_are_closed(fresh: IsolatedCalls) -> None:
    assert fresh.pid == 0
    assert call(fresh, "order") == "setup and order"
    server = fresh.pid
    assert call(fresh, "another") == "setup and another"
    assert fresh.pid == server
    fresh.close()
    assert fresh.pid == 0
    with pytest.raises(ServerClosedError):
        call(fresh, "order")


@pytest.mark.parametrize(
    ("order", "words", "killed", "expired"),
    [
        ("die 11", "SIGSEGV", signal.SIGSEGV, False),
        ("die 6", "SIGABRT", signal.SIGABRT, False),
        ("die 9", "SIGKILL", signal.SIGKILL, False),
        ("raise", "died", None, False),
        ("hang", "not done within 0.1 s", None, True),
        ("loop", "SIGPROF", signal.SIGPROF, False),
    ],
)
def test_calls_report_why_a_process_ended(
    calls: IsolatedCalls, order: str, words: str, killed: int | None, expired: bool
) -> None:
    """A signal, an error, the deadline, or the limit of CPU time; the next call has a new process."""
    deadline_s = 0.1 if expired else PATIENCE_S
    with pytest.raises(CallFailedError, match=words) as failure:
        call(calls, order, deadline_s)
    assert failure.value.expired is expired
    assert expired or failure.value.signal == killed
    assert call(calls, "next") == "setup and next"


def test_calls_are_limited_in_memory(calls: IsolatedCalls) -> None:
    assert call(calls, "take 8") == str(8 << 20)
    with pytest.raises(CallFailedError):
        call(calls, "take 64")


@pytest.mark.parametrize("size", ["0100000000000000", "00" * 7 + "10", "ff" * 8])
def test_calls_end_a_process_whose_answer_is_garbled(calls: IsolatedCalls, size: str) -> None:
    """A crash may have corrupted its memory, and the size that it states: it serves no further call."""
    first = call(calls, "pid", keep=True)
    with pytest.raises(CallFailedError, match="died"):
        call(calls, f"garble {size}", keep=True)
    assert call(calls, "pid", keep=True) != first


def test_calls_that_fail_do_not_disturb_others(calls: IsolatedCalls) -> None:
    """Processes are forked while others run, and inherit no descriptors that would hide the end of those."""
    orders = ["die 11", "raise", "hang", *map(str, range(8))] * 2

    def outcome(order: str) -> str:
        try:
            return call(calls, order, 0.5 if order == "hang" else PATIENCE_S)
        except CallFailedError as error:
            return "expired" if error.expired else "failed"

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(outcome, orders))
    expected = ["failed", "failed", "expired", *(f"setup and {n}" for n in range(8))]
    assert found == expected * 2


def test_kept_processes_answer_further_calls(calls: IsolatedCalls) -> None:
    """A dead one is not kept; if the server dies, both are replaced, and the call gets its reply."""

    def pid() -> int:
        return int(call(calls, "pid", keep=True))

    first = pid()
    assert pid() == first
    assert int(call(calls, "pid")) != first, "a call of its own has a process of its own"
    with pytest.raises(CallFailedError, match="SIGSEGV"):
        call(calls, "die 11", keep=True)
    assert pid() != first
    server = calls.pid
    os.kill(server, signal.SIGKILL)
    assert int(call(calls, "pid", keep=True, retry=True)) != first
    assert call(calls, "next") == "setup and next"
    assert calls.pid not in {0, server}


@pytest.mark.parametrize("keep", [False, True])
def test_calls_are_repeated_after_a_kill_from_outside(
    calls: IsolatedCalls, tmp_path: Path, keep: bool
) -> None:
    order = f"once {tmp_path}/{keep}"
    assert call(calls, order, keep=keep, retry=True) == "again"
    with pytest.raises(CallFailedError, match="SIGKILL"):
        call(calls, f"once {tmp_path}/other")


def test_kept_processes_are_replaced_after_many_calls(
    fresh: IsolatedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsched.isolated.calls.KEPT_CALLS_MAX", 3)
    found = [call(fresh, "pid", keep=True) for _ in range(6)]
    assert [found.count(each) for each in dict.fromkeys(found)] == [3, 3]


def test_calls_fail_when_there_is_no_file_descriptor(
    fresh: IsolatedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fails = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        patched.setattr("vsched.isolated.calls.socket.socketpair", fails)
        with pytest.raises(ServerLostError, match="shaky server can be started: Too many open"):
            call(fresh, "order")
    assert call(fresh, "order") == "setup and order"


def test_calls_fail_when_no_server_starts() -> None:
    calls = IsolatedCalls(
        "tests.unit.isolated.no_such_module", b"", name="absent", failure="it failed", code="failed"
    )
    with pytest.raises(ServerLostError, match="the absent server does not start"):
        call(calls, "order")
    calls.close()
