"""The outcomes of all limits, as a table with one row for neighbouring limits with equal outcomes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.limits.attempt import GOOD, KEYS, Case, Outcome, gist

COLUMNS = ("limit on", "ranks are", "MiB", "outcome", "settings named")


def failures(outcomes: Mapping[Case, Outcome]) -> dict[Case, Outcome]:
    """Return the cases that were neither served nor reported clearly."""
    return {case: one for case, one in outcomes.items() if one.verdict not in GOOD}


def table(outcomes: Mapping[Case, Outcome]) -> str:
    """Return a row for each range of limits with one outcome, as Markdown."""
    rows: list[tuple[str, str, list[int], str, str]] = []
    for case in sorted(outcomes, key=lambda one: (one.stage, not one.forked, one.limit_mib)):
        outcome = outcomes[case]
        named = ", ".join(f"`{key}`" for key in KEYS.values() if key in outcome.message)
        what = gist(outcome.message) if outcome.message else outcome.verdict
        if outcome.verdict not in GOOD:
            what = f"**{outcome.verdict}**: {what}"
        ranks = "forked" if case.forked else "new processes"
        row = (case.stage, ranks, [case.limit_mib], what, named)
        if rows and (*rows[-1][:2], *rows[-1][3:]) == (*row[:2], *row[3:]):
            rows[-1][2].append(case.limit_mib)
        else:
            rows.append(row)
    lines = [
        COLUMNS,
        ("---",) * len(COLUMNS),
        *((stage, ranks, span(limits), what, named) for stage, ranks, limits, what, named in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def span(limits: list[int]) -> str:
    """Return ascending numbers as a range."""
    return str(limits[0]) if len(limits) == 1 else f"{limits[0]}-{limits[-1]}"
