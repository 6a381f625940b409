"""Mutants that survive because they change nothing that anybody could notice, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""By the key of the mutant: `place: before -> after #number`."""
