"""Writes docs/benchmarks/gpu.md from measured results.

`python -m tests.bench.gpu.page FOLDER` reads the output of `python -m tests.bench.gpu`, complete or
not, and writes between the two comments of `docs/benchmarks/gpu.md`. `--page -` prints it instead.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TypeVar

import msgspec

from tests.bench.gpu.steps import StepResult
from tests.bench.gpu.tables import Figures, tables

PAGE = Path(__file__).parents[3] / "docs/benchmarks/gpu.md"
GIB = 1 << 30
T = TypeVar("T")


class Machine(msgspec.Struct, frozen=True):
    """The machine of the measurement."""

    device: str
    versions: dict[str, str]
    commit: str


class LedgerCheck(msgspec.Struct, frozen=True):
    """Bytes of a device by ledger line, and the total memory in use according to the driver."""

    claimed: dict[str, int]
    driver_before: int
    driver_ready: int
    driver_loaded: int


class KvTry(msgspec.Struct, frozen=True):
    """A start with a memory policy: the tokens of its KV cache, or 0 and the reason."""

    memory: str
    tokens: int
    seconds: float
    reason: str


def page(folder: Path) -> str:
    """Return the results as Markdown, with missing parts reported as missing."""
    machine = _read(folder / "machine.json", Machine)
    if machine is None:
        return "Nothing has been measured on a GPU yet.\n"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    parts = [f"{machine.device}; {versions}; commit {machine.commit}.\n"]
    parts += [_steps(folder), _families(folder / "parity.json"), _tests(folder / "tests.xml")]
    parts += [_recovery(folder / "recovery.json")]
    for figures in sorted(folder.glob("*/gpu.json")):
        parts.append(tables(msgspec.json.decode(figures.read_bytes(), type=Figures)))
    parts += [_kv(folder / "kv.json"), _ledger(folder / "ledger.json")]
    parts += [_serve(folder / "serve.json")]
    return "\n".join(part for part in parts if part)


def _read(path: Path, kind: type[T]) -> T | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def _steps(folder: Path) -> str:
    results = _read(folder / "steps.json", list[StepResult]) or []
    lines = ["| step | ending | seconds |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.ending} | {each.seconds:.0f} |" for each in results]
    return "\n".join(lines) + "\n"


def _families(path: Path) -> str:
    if not path.exists():
        return ""
    rows: dict[str, str] = msgspec.json.decode(path.read_bytes())["rows"]
    others = {name: result for name, result in rows.items() if result != "equal"}
    head = f"Small models in float32: {len(rows) - len(others)} of {len(rows)} generate the tokens of transformers."
    return "\n".join([head, *(f"- `{name}`: {result}" for name, result in others.items()), ""])


def _tests(path: Path) -> str:
    if not path.exists():
        return ""
    suite = next(ET.parse(path).iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    failed = [
        f"`{case.get('name')}`"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    names = f": {', '.join(failed)}" if failed else ""
    skipped = count["skipped"]
    return f"Tests: {passed} passed, {len(failed)} failed{names}; {skipped} skipped.\n"


def _kv(path: Path) -> str:
    tries = _read(path, list[KvTry])
    if not tries:
        return ""
    found, others = tries[0], tries[1:]
    if not found.tokens:
        return f"`auto-profile` found no KV cache: {found.reason}\n"
    largest = max([found.tokens, *(each.tokens for each in others)])
    below = 100 * (1 - found.tokens / largest)
    return (
        f"`auto-profile` found a KV cache of {found.tokens:,} tokens in a start of {found.seconds:.0f} s, "
        f"{below:.1f} % below the largest of {len(others)} others that survived the same steps: {largest:,}.\n"
    )


def _ledger(path: Path) -> str:
    check = _read(path, LedgerCheck)
    if check is None:
        return ""
    claimed = {name: size for name, size in check.claimed.items() if size}
    lines = ["| ledger | GiB |", "|---|---|"]
    lines += [f"| {name} | {size / GIB:.2f} |" for name, size in claimed.items()]
    driver = {
        "before the start": check.driver_before,
        "ready": check.driver_ready,
        "after the load": check.driver_loaded,
    }
    reported = ", ".join(f"{size / GIB:.2f} {when}" for when, size in driver.items())
    return "\n".join(lines) + f"\n\nIn use according to the driver, GiB: {reported}.\n"


def _recovery(path: Path) -> str:
    if not path.exists():
        return ""
    found = msgspec.json.decode(path.read_bytes())
    lines = []
    for each in found:
        ends = ", ".join(f"{second:.2f}" for second in each["ends_s"])
        same = "the same tokens" if each["same_tokens"] else "all tokens, not the same"
        lines.append(
            f"A generate rank was killed under load; seconds to each station: {ends}; {same}."
        )
    return "\n".join(lines) + "\n"


def _serve(path: Path) -> str:
    if not path.exists():
        return ""
    text = msgspec.json.format(path.read_bytes(), indent=1).decode()
    return f"`vsched bench serve`:\n\n```json\n{text}\n```\n"


def replaced(text: str, made: str) -> str:
    """Return a page with the text between its two comments replaced.

    Raises:
        ValueError: When the page lacks the comments.
    """
    opening, closing = "<!-- gpu: begin -->", "<!-- gpu: end -->"
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise ValueError(f"the page lacks {opening} or {closing}")
    return f"{before}{opening}\n\n{made}\n{closing}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.page", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", default=str(PAGE), help="the page to change, - to print")
    options = parser.parse_args()
    made = page(options.folder)
    if options.page == "-":
        print(made)
        return
    path = Path(options.page)
    path.write_text(replaced(path.read_text(), made))


if __name__ == "__main__":
    main()
