"""Helpers for checks of the values that policies return: each copies a value to built-in types, or raises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import index as to_int
from typing import SupportsIndex

COUNT_MAX = 2**31 - 1
"""Maximum of a count; messages to ranks and records have 32-bit counts."""
TIME_MAX_NS = 2**63 - 1
HOLD_MIN_NS = 1_000_000
"""Minimum of a hold: a shorter one, such as 5 ns for 5 s, would keep the host busy with calls until it ends."""
TEXT_CHARACTERS_MAX = 500
PASSED_OVER = "one that was passed over for too long goes first"
"""Reason of an answer that the kernel did not follow because of `policies.passed_over_max_s`."""
SHORT_HOLD = "a hold of less than 1 ms lasts 1 ms"


def check_number(value: SupportsIndex, *, most: int, least: int = 0) -> int:
    """Return an integer within bounds."""
    number = to_int(value)
    if not least <= number <= most:
        raise ValueError(f"{number} is outside {least} to {most}")
    return number


def check_index(value: SupportsIndex, count: int) -> int:
    """Return an index into `count` entries."""
    index = to_int(value)
    if not 0 <= index < count:
        raise ValueError(f"index {index} is outside 0 to {count - 1}")
    return index


def check_indices(values: Iterable[SupportsIndex], count: int) -> list[int]:
    """Return indices into `count` entries, at most as many: an iterator may be endless."""
    if type(values) is not list:
        values = islice(values, count + 1)
    indices = [to_int(one) for one in values]
    if len(indices) > count:
        raise ValueError(f"there are more indices than the {count} entries")
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"an index is outside 0 to {count - 1}: {indices}")
    return indices


def check_distinct(values: Iterable[SupportsIndex], count: int) -> Sequence[int]:
    """Return indices into `count` entries, each at most once."""
    if type(values) is range and values == range(count):
        return range(count)  # all in order, as most answers are
    indices = check_indices(values, count)
    if len(indices) > 1 and len(set(indices)) != len(indices):
        raise ValueError(f"indices repeat: {indices}")
    return indices


def check_hold(value: SupportsIndex, now_ns: int, arrived_ns: int, hold_max_ns: int) -> int:
    """Return the end of a hold, given the time of arrival."""
    until_ns = to_int(value)
    if until_ns <= now_ns:
        raise ValueError(f"the end of the hold, {until_ns}, is not after now, {now_ns}")
    if until_ns > arrived_ns + hold_max_ns:
        raise ValueError(f"held for over {hold_max_ns / 1e9:g} s (policies.passed_over_max_s)")
    return until_ns


def check_text(value: str) -> str:
    """Return a text as a plain str for records; raise if UTF-8 cannot encode it."""
    text = str.encode(value).decode()
    if not 1 <= len(text) <= TEXT_CHARACTERS_MAX:
        raise ValueError(f"a text of {len(text)} characters, not 1 to {TEXT_CHARACTERS_MAX}")
    return text


def put_first(indices: Sequence[int], overdue: int) -> Sequence[int]:
    """Return indices with an overdue one first, unless all before it are ahead in the queue; never none."""
    for index in indices:
        if index == overdue:
            break
        if index > overdue:
            return [overdue, *(other for other in indices if other != overdue)]
    return indices or [overdue]
