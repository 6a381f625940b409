"""The base class of all policies, a waiting entry, the bounds of fields, and the declaration of a decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from vsched.policy.measured import Measured, Measurements

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


FEATURES = {
    "hold": "an end of its holds at the given time",
    "time": "measured times of steps, and a time limit for prefill",
    "swap": "swap space for preempted requests",
    "preempt": "preemption of running requests for waiting ones",
    "encode": "an encode stage of its own",
}
"""Features of a host that a policy may need (`Policy.needs`). vsched has all, other hosts, such as vLLM, some."""


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

    def needs(self) -> Sequence[str]:
        """Return the `FEATURES` without which this policy is of no use; a host that lacks one refuses it at start."""
        return ()


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a policy that is called while requests run.

    Attributes:
        now_ns: Current time.
        measured: Measurements of the replica that the decision is about; of all replicas at arrival, in routing, and in
            the encode stage.
        state: State of the policy, to be changed in place; None without a `state_type`.
    """

    now_ns: int = 0
    measured: Measured = msgspec.field(default_factory=Measurements)
    state: Any = None


class RequestView(View, frozen=True, kw_only=True):
    """Input of a policy that decides about one request.

    Attributes:
        priority: Its priority; larger is more urgent.
        tenant: Its tenant; empty for none.
        session: Identifier of its conversation; empty if the client sent none.
    """

    priority: int = 0
    tenant: str = ""
    session: str = ""


class OfRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in a view; attributes as in `RequestView`."""

    priority: int = 0
    tenant: str = ""
    session: str = ""


class WaitingEntry(OfRequest, frozen=True, kw_only=True):
    """One waiting entry: an image in the encode stage, a request in the generate stage.

    An image has the highest priority of the requests that need it, the tenant of the first, and no session.

    Attributes:
        tokens: Tokens that it adds to steps: encoder output tokens, or prompt tokens that are not cached. None if
            unknown: do not count it as 0.
        blocks: KV blocks for all its tokens, including cached blocks; 0 for an image.
        arrived_ns: Time of arrival. Of an image: when a request first needed it.
        target_ns: Deadline of the first token; None for no target. Of an image: the earliest of the requests that need
            it.
        images: Number of its images; 0 for an image.
        image_tokens: Tokens of its images, a part of the prompt; 0 for an image.
        max_tokens: Maximum output tokens; 0 for an image.
        outputs: Output tokens so far: above 0 if it was preempted, or continues after a restart. 0 for an image.
    """

    tokens: int | None
    blocks: int = 0
    arrived_ns: int = 0
    target_ns: int | None = None
    images: int = 0
    image_tokens: int = 0
    max_tokens: int = 0
    outputs: int = 0


class PolicyKey(msgspec.Struct, frozen=True):
    """A configuration table that names a policy.

    Attributes:
        path: Its path, such as `generate.step`.
        use: Name of the default policy.
        description: Description for the table of configuration keys.
    """

    path: str
    use: str
    description: str


Method = TypeVar("Method", bound=Callable[..., Any])


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: one method of a policy class, which `decides` declares.

    Attributes:
        name: Name of the decision, and of its entry points: `vsched.admission`.
        base: The class that declares the method.
        method: Name of the method.
        selected_by: The configuration tables that name a policy for it, one for each seat.
        check: Function that copies a returned value to built-in types, or raises. Its further arguments are the facts
            that it needs. It does not get the view, which a policy could have changed by force.
        default: Function that decides after a failure, with the same facts.
        remembers: False if the method gets no state: a memory policy is a generator, an eviction order is an object.
        yields: Whether the method is a generator.
        in_kernel: Whether the kernel calls it. Only such a policy can be replaced while requests run, and is simulated.
    """

    name: str
    base: type[Policy]
    method: str
    selected_by: tuple[PolicyKey, ...]
    check: Callable[..., Any] | None = None
    default: Callable[..., Any] | None = None
    remembers: bool = True
    yields: bool = False
    in_kernel: bool = True

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the configuration tables."""
        return tuple(one.path for one in self.selected_by)


def decides(
    name: str,
    *selected_by: PolicyKey,
    check: Callable[..., Any] | None = None,
    default: Callable[..., Any] | None = None,
    **facts: bool,
) -> Callable[[Method], Method]:
    """Declare that a method of a policy base class makes a decision; the arguments are the fields of `Decision`."""

    def declare(method: Method) -> Method:
        fields = {"selected_by": selected_by, "check": check, "default": default, **facts}
        method.__dict__["decision"] = {"name": name, "method": method.__name__, **fields}
        return method

    return declare


def decisions_in(cls: type) -> list[Decision]:
    """Return the decisions that the methods of a class declare."""
    declared = [getattr(method, "decision", None) for method in vars(cls).values()]
    return [Decision(base=cls, **one) for one in declared if one is not None]
