"""Points in production code at which a simulation can inject faults.

Outside of tests and simulations, a point costs one function call and one global lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnPoint = Callable[[str, str], None]
"""Called with the name of a point and its subject; its exceptions propagate from the point."""

_on_point: OnPoint | None = None


def fault_point(name: str, subject: str = "") -> None:
    """Mark a point at which a fault can be injected.

    Pass only existing strings: formatting a name would cost more than the call.

    Args:
        name: Name of the point: package and next operation, as in `media.decode`.
        subject: Object of the operation, such as a group.
    """
    if _on_point is not None:
        _on_point(name, subject)


@contextmanager
def armed(on_point: OnPoint) -> Iterator[None]:
    """Let all fault points of this process call `on_point`; contexts nest, and the innermost one applies."""
    global _on_point
    before, _on_point = _on_point, on_point
    try:
        yield
    finally:
        _on_point = before
