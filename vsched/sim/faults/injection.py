"""Hands out the faults of a plan at the places where they strike."""

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
"""A kind of fault, or any of several."""


class Struck(msgspec.Struct, frozen=True):
    """A fault, and when it first did something."""

    now_ns: int
    fault: AnyFault


class Injector:
    """The faults of a plan, on a virtual loop.

    A fault that strikes once is handed out to the first part that asks when it is due; one that lasts is shown to all
    that ask meanwhile. Ties are permuted from here.

    Attributes:
        plan: Where the faults come from.
        struck: The faults that have done something, in order; the others of the plan found no occasion.
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
        """Return the faults of a kind that are for this target, past and future; None leaves it open."""
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
        """Return the first fault of a kind that is due for this target, and take it out of the plan."""
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
        """Return the faults of a kind that hold now for this target."""
        now_ns = self._loop.now_ns()
        found = [
            fault for fault in self.of(kind, group=group, rank=rank) if fault.at_ns <= now_ns < fault.end_ns
        ]  # fmt: skip
        for fault in found:
            self.note(fault)
        return found

    def note(self, fault: Fault) -> None:
        """Note that a lasting fault does something."""
        for place, one in enumerate(self._left):
            if one is fault:
                del self._left[place]
                self.struck.append(Struck(self._loop.now_ns(), one))
                return

    def raise_at(self, point: str, kind: type[F], error: Callable[[F], Exception]) -> None:
        """Have a fault point raise `error(fault)` for each fault of a kind, once it is due.

        A fault that names a group strikes where that group is the subject.
        """
        self._points[point] = (kind, error)  # type: ignore[assignment] # the kind goes with its error

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let the fault points of production code strike meanwhile."""
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
    """Return whether a fault is for a target; one that names no group is for all."""
    return (group is None or getattr(fault, "group", group) == group) and (
        rank is None or getattr(fault, "rank", rank) == rank
    )
