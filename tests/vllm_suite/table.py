"""Results of the tests: read from the shim's reports, written as tables."""

from __future__ import annotations

from collections import Counter

import msgspec

from tests.vllm_suite import reasons

ERROR_LETTERS = 200
MARK = "not applicable: "
KINDS = ("passed", "failed", "not served", "not applicable")


class Report(msgspec.Struct, frozen=True):
    """Pytest's report of one test: `message` is its error in short, `text` at length."""

    test: str
    outcome: str
    message: str = ""
    text: str = ""


class FileReport(msgspec.Struct, frozen=True):
    """One line of the shim's: a file of tests."""

    file: str
    outcomes: list[Report]


class Outcome(msgspec.Struct, frozen=True):
    """Result of one test, one of `KINDS`; `why` is the reason, or the first line of the error."""

    test: str
    kind: str
    why: str = ""


def read(lines: list[str]) -> dict[str, list[Report]]:
    """Read the shim's lines by file; a later one of the same file counts."""
    found = [msgspec.json.decode(line, type=FileReport) for line in lines]
    return {report.file: report.outcomes for report in found}


def judge(file: str, report: Report) -> Outcome:
    """Judge a report by the current tables of reasons."""
    if report.outcome == "passed":
        return Outcome(report.test, "passed")
    name = f"{file}::{report.test}".lower()
    given = report.message.removeprefix("Skipped: ").strip().removeprefix(MARK)
    reason = reasons.INTERNALS if given == reasons.INTERNALS else reasons.by_test(name)
    if reason is None and report.outcome == "skipped":
        reason = given or "skipped by vLLM"
    if reason is None:
        reason = reasons.by_failure(name, report.message + report.text)
    if reason is not None:
        return excused(report.test, reason)
    line = next((line for line in report.message.splitlines() if line.strip()), "no message")
    return Outcome(report.test, "failed", line[:ERROR_LETTERS])


def excused(test: str, reason: str) -> Outcome:
    """Return the outcome of a test that does not apply to vsched."""
    return Outcome(test, "not served" if reason in reasons.UNSERVED else "not applicable", reason)


def write(results: dict[str, list[Outcome]]) -> str:
    """Write the tables: passed tests by file, not applicable ones by reason, and failures."""
    total = Counter(outcome.kind for outcomes in results.values() for outcome in outcomes)
    lines = ["| file | " + " | ".join(KINDS) + " |", "|---|" + "--:|" * len(KINDS)]
    for file, outcomes in sorted(results.items()):
        counts = Counter(outcome.kind for outcome in outcomes)
        if counts["passed"] or counts["failed"]:
            lines.append(_row(file, counts))
    lines.append(_row(f"all {len(results)} files", total))
    for kind in KINDS[2:]:
        why = Counter(o.why for outcomes in results.values() for o in outcomes if o.kind == kind)
        lines += ["", f"| {kind}: reason | tests |", "|---|--:|"]
        lines += [f"| {_cell(reason)} | {count} |" for reason, count in why.most_common()]
    failed = [
        (f, o) for f, outcomes in sorted(results.items()) for o in outcomes if o.kind == "failed"
    ]
    if failed:
        lines += ["", "| failed | first line of the error |", "|---|---|"]
        lines += [f"| {file}: {_cell(o.test)} | {_cell(o.why)} |" for file, o in failed]
    return "\n".join(lines) + "\n"


def _row(name: str, counts: Counter[str]) -> str:
    return f"| {name} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text.replace("[", "\\[")
