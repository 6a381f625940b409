"""`python -m tests.parity`: compare architectures with transformers' `generate`, and write docs/models.md's tables.

With names, only these are compared and nothing is written; with `images` or `videos` those that take these, and their
table is written. It takes about ten minutes.

`--device cuda:0` compares all of them on a GPU, in several processes, and `--json FILE` records the results;
`--recorded FILE` keeps them as `tests/parity/cuda.json`, from which the tables have their column *cuda*.
`--device cuda-on-host` runs the code of the CUDA backend on a CPU, with stand-ins for streams, copies and Triton's
kernels.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers.utils import logging

from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES, REFUSED
from tests.parity.compare import Parity, compare, refusal_of
from tests.parity.on_device import EQUAL, NOT_RUN, compare_on_device, record, recorded
from tests.parity.video_compare import compare_video
from tests.parity.vision_architectures import VISION_ARCHITECTURES, VISION_REFUSED
from tests.parity.vision_checkpoints import WITH_VIDEO
from tests.parity.vision_compare import compare_own, compare_vision
from tests.workers.parallel.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- parity: begin -->\n", "<!-- parity: end -->\n"
VIDEO_BEGIN, VIDEO_END = "<!-- video parity: begin -->\n", "<!-- video parity: end -->\n"
SEEING_BEGIN, SEEING_END = "<!-- image parity: begin -->\n", "<!-- image parity: end -->\n"
HEAD = "| path | ranks | architectures | cuda |\n|---|---|---|---|"
COLUMNS = 4
IMAGES = " with images"


def row(name: str, parity: Parity) -> str:
    """One line of the terminal for an architecture."""
    result = "UNEQUAL: " + ", ".join(parity.unequal) if parity.unequal else "equal"
    return f"{name}: {parity.path}, {result}"


def grouped(found: dict[str, Parity], suffix: str = "") -> list[str]:
    """Table rows: the names of equal architectures by path and number of ranks, then the unequal ones."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, parity in found.items():
        ranks = "several" if parity.two_ranks else "one"
        key = (parity.path, "**unequal**" if parity.unequal else ranks)
        groups.setdefault(key, []).append(f"`{name}`")
    return [
        f"| {path} | {ranks} | {', '.join(names)} | {on_cuda(names, suffix)} |"
        for (path, ranks), names in groups.items()
    ]


def on_cuda(names: Sequence[str], suffix: str) -> str:
    """Return the cell of the results on a GPU: those that are not equal are named."""
    rows = recorded().rows
    cells: dict[str, list[str]] = {}
    for name in names:
        result = rows.get(name.strip("`") + suffix, NOT_RUN)
        cells.setdefault(result if result in {EQUAL, NOT_RUN} else "unequal", []).append(name)
    if len(cells) == 1:
        return next(iter(cells))
    return "; ".join(
        f"{result}: {', '.join(each) if result != EQUAL else len(each)}"
        for result, each in cells.items()
    )


def with_column(text: str, begin: str, end: str, suffix: str = "") -> str:
    """Return the page with the column of the results on a GPU as recorded."""
    before, _, rest = text.partition(begin)
    table, _, after = rest.partition(end)
    lines = []
    for line in table.splitlines():
        cells = cells_of(line)
        if len(cells) == COLUMNS and cells[2].startswith("`"):
            cells[3] = on_cuda(cells[2].split(", "), suffix)
            line = f"| {' | '.join(cells)} |"
        lines.append(line)
    return f"{before}{begin}" + "\n".join([*lines, ""]) + f"{end}{after}"


def refused_rows(refused: dict[str, str]) -> list[str]:
    """Table rows: the names of refused architectures by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in refused.items():
        reasons.setdefault(why or "**is not refused**", []).append(f"`{name}`")
    return [f"| {why} | {', '.join(names)} |" for why, names in reasons.items()]


def tables(found: dict[str, Parity], refused: dict[str, str]) -> str:
    """Content between the marks of the page: equal architectures, then refused ones."""
    head = [HEAD, *grouped(found), "", "| reason of the refusal | architectures |", "|---|---|"]
    return "\n".join([*head, *refused_rows(refused), ""])


def write(begin: str, end: str, content: str) -> None:
    """Put content between two marks of the page."""
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{begin}{content}{end}{after}")


def main(arguments: list[str]) -> int:
    """Compare, say so, and return the number of differences."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, or `images`, or `videos`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with another device")
    parser.add_argument("--json", type=Path, help="file of the results, with another device")
    parser.add_argument("--recorded", type=Path, help="results on a GPU to keep")
    options = parser.parse_args(arguments)
    names: list[str] = options.names
    logging.disable_progress_bar()
    if options.recorded is not None:
        record(options.recorded)
        text = with_column(PAGE.read_text(), BEGIN, END)
        PAGE.write_text(with_column(text, SEEING_BEGIN, SEEING_END, IMAGES))
        return 0
    if options.device != "cpu":
        return compare_on_device(names, options.device, jobs=options.jobs, to=options.json)
    if names == ["images"]:
        return compare_images()
    if names == ["videos"]:
        return compare_videos()
    with tempfile.TemporaryDirectory(prefix="vsched-ranks-") as folder:
        ranks = Ranks(2, Path(folder))
        seeing = [name for name in names if name in VISION_ARCHITECTURES]
        others = [name for name in names or [*FAMILY_SIZES, *ARCHITECTURES] if name not in seeing]
        found = compare_all(functools.partial(compare, ranks=ranks), others)
        ranks.stop()
    if names:
        return differences(found | compare_all(compare_vision, seeing))
    refused = {name: refusal_of(name) for name in REFUSED}
    write(BEGIN, END, tables(found, refused))
    unrefused = list(refused.values()).count("")
    return differences(found) + unrefused + compare_images() + compare_videos()


def compare_all(compare: Callable[[str], Parity], names: Sequence[str]) -> dict[str, Parity]:
    """Compare architectures, print each result, and return all."""
    found: dict[str, Parity] = {}
    for name in names:
        found[name] = compare(name)
        print(row(name, found[name]), flush=True)
    return found


def differences(found: Mapping[str, Parity]) -> int:
    return sum(bool(parity.unequal) for parity in found.values())


def compare_images() -> int:
    """Compare the architectures that take images, write their table, and return the number of differences."""
    seeing = [name for name in VISION_ARCHITECTURES if name not in VISION_REFUSED]
    found = compare_all(compare_own, [*FAMILY_SIZES]) | compare_all(compare_vision, seeing)
    write(SEEING_BEGIN, SEEING_END, "\n".join([HEAD, *grouped(found, IMAGES), ""]))
    return differences(found)


def compare_videos() -> int:
    """Compare the architectures that take videos, write their table, and return the number of differences."""
    found = compare_all(compare_video, [*FAMILY_SIZES, *WITH_VIDEO])
    lines = [f"| {path} | {names} |" for path, _, names, _ in map(cells_of, grouped(found))]
    head = "| path | architectures |\n|---|---|"
    write(VIDEO_BEGIN, VIDEO_END, "\n".join([head, *lines, ""]))
    return differences(found)


def cells_of(line: str) -> list[str]:
    """Return the cells of a table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
