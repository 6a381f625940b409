"""The state of a scheduler as bytes, and back.

A record must be replayable from the middle, so every segment of it begins with the whole state. That is a struct of
plain values (`vsched.kernel.scheduler.SchedulerState`): requests are known by number and items by key, so it is
encoded as it is, names no class and calls no code but the `restore` of the configured eviction orders.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from vsched.errors import RecordError
from vsched.kernel import KernelPolicies, Scheduler, SchedulerLimits
from vsched.kernel.scheduler import SchedulerState


class SnapshotError(RecordError):
    """A recorded state cannot be restored."""


def _pack(one: Any) -> bytes:
    if type(one) is array:
        return one.tobytes()
    raise TypeError(f"{type(one).__qualname__} cannot be recorded")


def _unpack(kind: type, value: Any) -> Any:
    if kind is array and type(value) is bytes:
        return array("i", value)
    raise ValueError(f"a {kind.__qualname__} is not recorded")


_decoder = msgspec.msgpack.Decoder(SchedulerState, dec_hook=_unpack)


def encode_state(kernel: Scheduler) -> bytes:
    """Return the state of a scheduler as bytes.

    Raises:
        RecordError: When an eviction order's state cannot be recorded; it says why.
    """
    return msgspec.msgpack.encode(kernel.state(), enc_hook=_pack)


def restore_scheduler(data: bytes, limits: SchedulerLimits, policies: KernelPolicies) -> Scheduler:
    """Return a scheduler with the state that `encode_state` wrote.

    Raises:
        RecordError: When the bytes are no state of a scheduler with these limits and policies.
    """
    kernel = Scheduler(limits, policies)
    try:
        kernel.restore(_decoder.decode(data))
    except RecordError:
        raise
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the recorded state cannot be read: {type(error).__name__}: {error}"
        ) from error
    return kernel
