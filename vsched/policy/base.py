"""The base class of all policies, a waiting entry, and the bounds of fields."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the policy classes. A policy class has one method per decision; its fields are its configuration.

    Attributes:
        api_version: Version of the base class that a policy was written for.
        state_type: Struct that the kernel keeps for this policy between two calls; None for no state. It has a default
            for every field, and holds plain values: None, bool, int, float, str, bytes, enums, lists, tuples,
            dictionaries and structs. A call gets a copy as `view.state` and changes it in place. The changes are kept
            if the returned value is valid, and dropped if the call fails.
    """

    api_version: ClassVar[int] = 3
    state_type: ClassVar[type[msgspec.Struct] | None] = None


class WaitingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting entry: an image in the encode stage, a request in the generate stage.

    Attributes:
        tokens: Tokens that it adds to steps: encoder output tokens, or prompt tokens that are not cached. None if
            unknown: do not count it as 0.
        blocks: KV blocks for all its tokens, including cached blocks; 0 for an image.
        priority: Larger is more urgent. Of an image: the highest of the requests that need it.
        arrived_ns: Time of arrival. Of an image: when a request first needed it.
        target_ns: Deadline of the first token; None for no target. Of an image: the earliest of the requests that need
            it.
        tenant: Tenant of the request; empty for none. Of an image: of the first request that needed it.
    """

    tokens: int | None
    blocks: int = 0
    priority: int = 0
    arrived_ns: int = 0
    target_ns: int | None = None
    tenant: str = ""
