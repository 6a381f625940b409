"""Places in production code where a simulation may let something go wrong.

A place costs a call and a look at one name while nothing is armed, which is always so outside of tests and simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnPoint = Callable[[str, str], None]
"""Called with the name of a place and its subject; what it raises is raised at that place."""

_on_point: OnPoint | None = None


def fault_point(name: str, subject: str = "") -> None:
    """Mark a place where a fault can be injected.

    Pass only what is at hand: a name that has to be made costs more than the place itself.

    Args:
        name: The place: the package, then what is about to happen, as in `media.decode`.
        subject: What it happens to, such as a group.
    """
    if _on_point is not None:
        _on_point(name, subject)


@contextmanager
def armed(on_point: OnPoint) -> Iterator[None]:
    """Have all fault points of this process call `on_point`; contexts nest, the innermost counts."""
    global _on_point
    before, _on_point = _on_point, on_point
    try:
        yield
    finally:
        _on_point = before
