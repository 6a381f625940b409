"""Waiting entries and views for tests of admission policies."""

from __future__ import annotations

from typing import Any

from vsched.policy import Admission, AdmissionView, RequestPolicy, WaitingEntry
from vsched.policy.measured import Measurements

SECOND_NS = 1_000_000_000


class Item(WaitingEntry, frozen=True):
    """A waiting entry whose tokens may be given by position."""

    tokens: int | None


def ask(
    policy: RequestPolicy, waiting: list[Item], *, divisible: bool = False, **view: Any
) -> Admission:
    """Call a policy with these entries, of the generate stage if divisible, else of the encode stage."""
    usual = {
        "now_ns": 0,
        "tokens_free": 0,
        "entries_free": 100,
        "blocks_free": 0,
        "running": 0,
        "default_tokens": 2048,
        "measured": Measurements(),
    }
    stage = "generate" if divisible else "encode"
    return policy.admit(
        AdmissionView(stage=stage, waiting=waiting, divisible=divisible, **{**usual, **view})
    )


def admit(
    policy: RequestPolicy, sizes: list[int | None], **view: Any
) -> tuple[list[int | None], list[int | None]]:
    """Return the sizes admitted and the sizes that remain, each in order; the entries arrived at 0."""
    admission = ask(policy, [Item(size) for size in sizes], **view)
    assert admission.hold_until_ns is None, "the policy holds all entries"
    chosen = list(admission.indices)
    rest = [size for index, size in enumerate(sizes) if index not in chosen]
    return [sizes[index] for index in chosen], rest
