"""Results of all mutants: a table by file, and the survivors as differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutate import Mutant, file_of
from tests.mutants.trial import Verdict

ALIVE = ("survived", "unreached")
COLUMNS = ("mutants", "killed", "of these by an endless loop", "equivalent", "survived")


def survivors(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> list[Mutant]:
    """Return the mutants that were not noticed, and are not listed as equivalent."""
    return [
        one
        for one in mutants
        if one.key in verdicts and verdicts[one.key].outcome in ALIVE and one.key not in EQUIVALENT
    ]


def misjudged(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the entries of `EQUIVALENT` that are killed, or no longer exist."""
    known = {one.key for one in mutants}
    return [
        key
        for key in EQUIVALENT
        if key not in known or (key in verdicts and verdicts[key].outcome not in ALIVE)
    ]


def table(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> str:
    """Return the counts by file, as Markdown."""
    counts: dict[str, Counter[str]] = {}
    for one in mutants:
        if one.key in verdicts:
            outcome = verdicts[one.key].outcome
            count = counts.setdefault(file_of(one.place), Counter())
            count["mutants"] += 1
            if outcome not in ALIVE:
                count["killed"] += 1
                count["of these by an endless loop"] += outcome == "timeout"
            else:
                count["equivalent" if one.key in EQUIVALENT else "survived"] += 1
    counts["together"] = sum(counts.values(), Counter())
    rows = [
        ("file", *COLUMNS),
        ("---", *("--:" for _ in COLUMNS)),
        *(
            (f"`{name}`" if "/" in name else name, *(str(count[one]) for one in COLUMNS))
            for name, count in counts.items()
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def differences(mutants: Sequence[Mutant]) -> str:
    """Return mutants as differences."""
    return "\n".join(
        f"{file_of(one.place)}:{one.line} {one.place.partition(':')[2]} #{one.number}\n"
        f"- {one.before}\n+ {one.after}"
        for one in mutants
    )
