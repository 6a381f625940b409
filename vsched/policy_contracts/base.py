"""What all policy contracts stand on: the base class, what waits, and the bounds of fields."""

from __future__ import annotations

from typing import Annotated, ClassVar, Protocol

import msgspec

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields are configuration; `kind` and `method` name the contract and the one method to override.

    Attributes:
        remembers: Whether policies of this kind may have a state.
        state_type: The struct that the kernel keeps for this policy between two calls; None for no state. It has a
            default for every field, and holds plain values: None, bool, int, float, str, bytes, enums, lists, tuples,
            dictionaries and structs. A call gets it as `view.state`, a copy of its own, and changes it in place. What
            it leaves there is kept if the answer is accepted, and forgotten if the call fails.
    """

    api_version: ClassVar[int] = 1
    kind: ClassVar[str] = ""
    method: ClassVar[str] = ""
    remembers: ClassVar[bool] = True
    state_type: ClassVar[type[msgspec.Struct] | None] = None


class WaitingEntry(Protocol):
    """One waiting entry: an item in the encode stage, a request in the generate stage.

    `tokens` is what it adds to a step: encoder output tokens, or prompt tokens still to be computed. None means that
    the size is not known; such an entry is never counted as 0. `blocks` is the KV blocks it needs (0 for items).
    A larger `priority` is more urgent. `target_ns` is when its first token is due, None without a target. `tenant` is
    whose request it is, empty where nobody says; of an item, whose request needed it first.
    """

    @property
    def tokens(self) -> int | None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrived_ns(self) -> int: ...
    @property
    def target_ns(self) -> int | None: ...
    @property
    def tenant(self) -> str: ...
