"""Injection of planned faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from vsched.faultpoints import armed
from vsched.sim.faults.plan import AnyFault, Fault, FaultPlan, Lasting, TiePermutation
from vsched.sim.loop.virtual_loop import VirtualLoop

F = TypeVar("F", bound=Fault)
L = TypeVar("L", bound=Lasting)
Kinds = type[F] | tuple[type[F], ...]
"""A kind of fault, or several."""


class Struck(msgspec.Struct, frozen=True):
    """A fault, and the first time it had an effect."""

    now_ns: int
    fault: AnyFault


class Injector:
    """Injects the faults of a plan on a virtual loop.

    A one-time fault goes to the first caller that asks once it is due; a lasting fault is visible
    to all callers while it lasts. `TiePermutation` is applied here.

    Attributes:
        plan: The planned faults.
        struck: Faults that had an effect, in order; the other planned faults found no occasion.
    """

    def __init__(self, plan: FaultPlan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.struck: list[Struck] = []
        self._loop = loop
        self._left: list[AnyFault] = sorted(plan.faults, key=lambda fault: fault.at_ns)
        self._points: dict[str, tuple[type[Fault], Callable[[Fault], Exception]]] = {}
        for fault in self.of(TiePermutation):
            loop.call_at_ns(fault.at_ns, self._permute, fault)

    def of(self, kind: Kinds[F], *, group: str | None = None, rank: int | None = None) -> list[F]:
        """Return all planned faults of a kind for this target, past and future; None matches any."""
        return [
            fault for fault in self.plan.faults if isinstance(fault, kind) and _hits(fault, group, rank)
        ]  # fmt: skip

    def take(
        self,
        kind: Kinds[F],
        *,
        group: str | None = None,
        rank: int | None = None,
        such: Callable[[F], bool] = lambda _: True,
    ) -> F | None:
        """Remove and return the first fault of a kind that is due for this target."""
        now_ns = self._loop.now_ns()
        for place, fault in enumerate(self._left):
            if fault.at_ns > now_ns:
                return None
            if isinstance(fault, kind) and _hits(fault, group, rank) and such(fault):
                del self._left[place]
                self.struck.append(Struck(now_ns, fault))
                return fault
        return None

    def active(
        self, kind: Kinds[L], *, group: str | None = None, rank: int | None = None
    ) -> list[L]:
        """Return the faults of a kind that are active for this target."""
        now_ns = self._loop.now_ns()
        found = [
            fault for fault in self.of(kind, group=group, rank=rank) if fault.at_ns <= now_ns < fault.end_ns
        ]  # fmt: skip
        for fault in found:
            self.note(fault)
        return found

    def note(self, fault: Fault) -> None:
        """Record that a lasting fault had an effect."""
        for place, one in enumerate(self._left):
            if one is fault:
                del self._left[place]
                self.struck.append(Struck(self._loop.now_ns(), one))
                return

    def raise_at(self, point: str, kind: type[F], error: Callable[[F], Exception]) -> None:
        """Make a fault point raise `error(fault)` for each fault of a kind, once it is due.

        A fault that names a group applies only when that group is the subject.
        """
        self._points[point] = (kind, error)  # type: ignore[assignment] # the kind goes with its error

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Enable the fault points of production code within the context."""
        with armed(self._on_point):
            yield

    def _on_point(self, name: str, subject: str) -> None:
        if name in self._points:
            kind, error = self._points[name]
            fault = self.take(kind, group=subject or None)
            if fault is not None:
                raise error(fault)

    def _permute(self, fault: TiePermutation) -> None:
        self.note(fault)
        self._loop.permute_ties(fault.seed)


def _hits(fault: Fault, group: str | None, rank: int | None) -> bool:
    """Return True if a fault applies to a target; a fault without a group applies to all."""
    return (group is None or getattr(fault, "group", group) == group) and (
        rank is None or getattr(fault, "rank", rank) == rank
    )
