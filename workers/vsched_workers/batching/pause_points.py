"""Points within a layer where encoding may pause: one layer of a large image takes seconds.

Products and attention report the operations that they computed; `sliced_run.py` counts them in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

PIECE_OPERATIONS = 2e10
"""Operations that count as one layer, within a layer of more: about 0.05 s of two cores with AVX-512."""

REPORT: ContextVar[Callable[[float], None] | None] = ContextVar("report", default=None)
"""Called with the operations of each piece of work of a run that may pause."""


def report_computed(operations: float) -> None:
    """Report computed operations, multiplications and additions; the run may pause here."""
    if (report := REPORT.get()) is not None:
        report(operations)
