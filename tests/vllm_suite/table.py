"""What became of the tests: read from pytest's reports, written as tables."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from tests.vllm_suite import reasons

ERROR_LETTERS = 200
MARK = "not applicable: "


class Outcome(msgspec.Struct, frozen=True):
    """What became of one test; `why` is the reason, or the first line of the error."""

    test: str
    kind: str
    why: str = ""


def read(report: str) -> list[Outcome]:
    """Read a report in pytest's JUnit form."""
    found: list[Outcome] = []
    for case in ET.fromstring(report).iter("testcase"):
        name = case.get("name") or "?"
        trouble = case.find("failure")
        trouble = case.find("error") if trouble is None else trouble
        skipped = case.find("skipped")
        if trouble is not None:
            found.append(_failed(name, trouble.get("message") or "", trouble.text or ""))
        elif skipped is not None:
            why = (skipped.get("message") or "").strip()
            found.append(
                Outcome(name, "not applicable", why.removeprefix(MARK) or "skipped by vLLM")
            )
        else:
            found.append(Outcome(name, "passed"))
    return found


def _failed(name: str, message: str, text: str) -> Outcome:
    if reason := reasons.by_error(message + text):
        return Outcome(name, "not applicable", reason)
    line = next((line for line in message.splitlines() if line.strip()), "no message")
    return Outcome(name, "failed", line[:ERROR_LETTERS])


def write(results: dict[str, list[Outcome]]) -> str:
    """Write the tables: what passed by file, what was not applicable by reason, and what failed."""
    total = Counter(outcome.kind for outcomes in results.values() for outcome in outcomes)
    lines = ["| file | passed | not applicable | failed |", "|---|--:|--:|--:|"]
    for file, outcomes in sorted(results.items()):
        counts = Counter(outcome.kind for outcome in outcomes)
        if counts["passed"] or counts["failed"]:
            lines.append(
                f"| {file} | {counts['passed']} | {counts['not applicable']} | {counts['failed']} |"
            )
    lines.append(
        f"| all {len(results)} files | {total['passed']} | {total['not applicable']} | {total['failed']} |"
    )
    why = Counter(
        o.why for outcomes in results.values() for o in outcomes if o.kind == "not applicable"
    )
    lines += ["", "| not applicable because | tests |", "|---|--:|"]
    lines += [f"| {_cell(reason)} | {count} |" for reason, count in why.most_common()]
    failed = [
        (f, o) for f, outcomes in sorted(results.items()) for o in outcomes if o.kind == "failed"
    ]
    if failed:
        lines += ["", "| failed | first line of the error |", "|---|---|"]
        lines += [f"| {file}: {_cell(o.test)} | {_cell(o.why)} |" for file, o in failed]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text.replace("[", "\\[")


def keep(path: Path, results: dict[str, list[Outcome]]) -> None:
    """Write the results, so that a run that was cut off goes on."""
    path.write_text(json.dumps(msgspec.to_builtins(results), indent=1))


def kept(path: Path) -> dict[str, list[Outcome]]:
    """Read results that were kept, none where there are none."""
    return (
        msgspec.json.decode(path.read_bytes(), type=dict[str, list[Outcome]])
        if path.exists()
        else {}
    )
