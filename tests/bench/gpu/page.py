"""Writes docs/benchmarks/gpu.md from measured results.

`python -m tests.bench.gpu.page FOLDER` reads the output of `python -m tests.bench.gpu`, complete or
not, and writes between the two comments of `docs/benchmarks/gpu.md`. `--page -` prints it instead.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.gpu.steps import StepResult
from tests.bench.gpu.tables import FIGURES, Figures, tables
from tests.bench.report import replace_between

PAGE = Path(__file__).parents[3] / "docs/benchmarks/gpu.md"
GIB = 1 << 30


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


SERVER = "server.json"
"""File of the results of whole servers."""


class ServerResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of whole servers: KV caches, ledger, and reports of `vsched bench serve`; None if not measured."""

    kv: list[KvTry] | None = None
    ledger: LedgerCheck | None = None
    load: list[Any] | None = None


def add_results(folder: Path, **found: Any) -> None:
    """Add results of whole servers to those in a folder."""
    file, before = folder / SERVER, ServerResults()
    if file.exists():
        before = msgspec.json.decode(file.read_bytes(), type=ServerResults)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(before, **found)))


def page(folder: Path) -> str:
    """Return the results as Markdown, without the parts that are missing."""
    parts: list[tuple[Path, Any, Callable[[Any], str]]] = [
        (folder / "machine.json", Machine, _machine),
        (folder / "steps.json", list[StepResult], _steps),
        (folder / "parity.json", dict[str, Any], _families),
        (folder / "tests.xml", None, _tests),
        (folder / "recovery.json", list[dict[str, Any]], _recovery),
        (folder / FIGURES, dict[str, Figures], _figures),
        (folder / SERVER, ServerResults, _server),
    ]
    if not parts[0][0].exists():
        return "Nothing has been measured on a GPU yet.\n"
    return "\n".join(
        render(path if kind is None else msgspec.json.decode(path.read_bytes(), type=kind))
        for path, kind, render in parts
        if path.exists()
    )


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{machine.device}; {versions}; commit {machine.commit}.\n"


def _steps(results: list[StepResult]) -> str:
    lines = ["| step | ending | seconds |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.ending} | {each.seconds:.0f} |" for each in results]
    return "\n".join(lines) + "\n"


def _families(found: dict[str, Any]) -> str:
    rows: dict[str, str] = found["rows"]
    others = {name: result for name, result in rows.items() if result != "equal"}
    head = f"Small models in float32: {len(rows) - len(others)} of {len(rows)} generate the tokens of transformers."
    return "\n".join([head, *(f"- `{name}`: {result}" for name, result in others.items()), ""])


def _tests(path: Path) -> str:
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


def _figures(found: dict[str, Figures]) -> str:
    return "\n".join(map(tables, found.values()))


def _server(found: ServerResults) -> str:
    parts: list[tuple[Callable[[Any], str], Any]] = [
        (_kv, found.kv),
        (_ledger, found.ledger),
        (_serve, found.load),
    ]
    return "\n".join(render(each) for render, each in parts if each is not None)


def _kv(tries: list[KvTry]) -> str:
    found, *others = tries
    if not found.tokens:
        return f"`auto-profile` found no KV cache: {found.reason}\n"
    largest = max(each.tokens for each in tries)
    below = 100 * (1 - found.tokens / largest)
    return (
        f"`auto-profile` found a KV cache of {found.tokens:,} tokens in a start of {found.seconds:.0f} s, "
        f"{below:.1f} % below the largest of {len(others)} others that survived the same steps: {largest:,}.\n"
    )


def _ledger(check: LedgerCheck) -> str:
    lines = ["| ledger | GiB |", "|---|---|"]
    lines += [f"| {name} | {size / GIB:.2f} |" for name, size in check.claimed.items() if size]
    driver = {
        "before the start": check.driver_before,
        "ready": check.driver_ready,
        "after the load": check.driver_loaded,
    }
    reported = ", ".join(f"{size / GIB:.2f} {when}" for when, size in driver.items())
    return "\n".join(lines) + f"\n\nIn use according to the driver, GiB: {reported}.\n"


def _recovery(found: list[dict[str, Any]]) -> str:
    lines = []
    for each in found:
        ends = ", ".join(f"{second:.2f}" for second in each["ends_s"])
        same = "the same tokens" if each["same_tokens"] else "not the same tokens"
        lines.append(
            f"A generate rank was killed under load; seconds to each station: {ends}; {same}."
        )
    return "\n".join(lines) + "\n"


def _serve(found: Any) -> str:
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    return f"`vsched bench serve`:\n\n```json\n{text}\n```\n"


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
    markers = "<!-- gpu: begin -->", "<!-- gpu: end -->"
    path.write_text(replace_between(path.read_text(), *markers, made))


if __name__ == "__main__":
    main()
