"""Waiting entries and views for tests of admission policies."""

from __future__ import annotations

from vsched.policy import Admission, AdmissionView, RequestPolicy, WaitingEntry
from vsched.policy.measured import Measured, Measurements

SECOND_NS = 1_000_000_000


class Item(WaitingEntry, frozen=True):
    """A waiting entry whose tokens may be given by position."""

    tokens: int | None


def ask(
    policy: RequestPolicy,
    waiting: list[Item],
    *,
    entries_free: int = 100,
    tokens_free: int = 0,
    blocks_free: int = 0,
    divisible: bool = False,
    default_tokens: int = 2048,
    now_ns: int = 0,
    measured: Measured | None = None,
    state: object = None,
) -> Admission:
    """Call a policy with these entries, of the generate stage if divisible, else of the encode stage."""
    view = AdmissionView(
        stage="generate" if divisible else "encode",
        now_ns=now_ns,
        waiting=waiting,
        tokens_free=tokens_free,
        entries_free=entries_free,
        blocks_free=blocks_free,
        running=0,
        divisible=divisible,
        default_tokens=default_tokens,
        measured=measured or Measurements(),
        state=state,
    )
    return policy.admit(view)


def admit(
    policy: RequestPolicy,
    sizes: list[int | None],
    *,
    entries_free: int = 100,
    tokens_free: int = 0,
    divisible: bool = False,
    default_tokens: int = 2048,
    now_ns: int = 0,
) -> tuple[list[int | None], list[int | None]]:
    """Return the sizes admitted and the sizes that remain, each in order; the entries arrived at 0."""
    admission = ask(
        policy,
        [Item(size) for size in sizes],
        entries_free=entries_free,
        tokens_free=tokens_free,
        divisible=divisible,
        default_tokens=default_tokens,
        now_ns=now_ns,
    )
    assert admission.hold_until_ns is None, "the policy holds all entries"
    chosen = list(admission.indices)
    rest = [size for index, size in enumerate(sizes) if index not in chosen]
    return [sizes[index] for index in chosen], rest
