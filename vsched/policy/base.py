"""The base class of all policies, a waiting entry, and the bounds of fields."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the policy classes, each of which has a method for each of its decisions; fields are configuration.

    Attributes:
        api_version: Version of the base class that a policy was written for.
        state_type: Struct that the kernel keeps for this policy between two calls; None for no state. It has a
            default for every field, and holds plain values: None, bool, int, float, str, bytes, enums, lists, tuples,
            dictionaries and structs. A call gets a copy as `view.state` and changes it in place. The changes are kept
            if the answer is accepted, and dropped if the call fails.
    """

    api_version: ClassVar[int] = 3
    state_type: ClassVar[type[msgspec.Struct] | None] = None


class WaitingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting entry: an item in the encode stage, a request in the generate stage.

    Attributes:
        tokens: What it adds to a step: encoder output tokens, or prompt tokens still to be computed. None if the size
            is not known; such an entry is never counted as 0.
        blocks: KV blocks of all its tokens, cached ones included; 0 for items.
        priority: A larger one is more urgent.
        target_ns: When its first token is due; None without a target.
        tenant: Tenant of the request, empty for none; of an item, of the request that needed it first.
    """

    tokens: int | None
    blocks: int = 0
    priority: int = 0
    arrived_ns: int = 0
    target_ns: int | None = None
    tenant: str = ""
