"""Minimum time of each step on two devices: `python -m tests.bench.gpu.roofline` writes it into `docs/gpu.md`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench.gpu.costs import DEVICES, IMAGES, SHAPES, TURNS, Shape, cases, patches_of
from tests.bench.gpu.page import replaced

PAGE = Path(__file__).parents[3] / "docs/gpu.md"
SHOWN = ("3b", "7b")
SKIPPED = ("decode 2 ", "decode 4 ", "decode 16 ", "decode 128 ")
TEXT_TOKENS = 64


def roofline() -> str:
    """The tables, in Markdown: one row per case of all shapes."""
    costs = {name: cases(SHAPES[name]) for name in SHOWN}
    heads = [f"{name} GB | {' | '.join(f'{d.name} ms' for d in DEVICES)}" for name in SHOWN]
    lines = [f"| step | {' | '.join(heads)} |", "|---" * (1 + len(SHOWN) * 3) + "|"]
    for case in costs[SHOWN[0]]:
        if case.startswith(SKIPPED):
            continue
        cells = [
            f"{cost.moved / 1e9:.2f} | " + " | ".join(f"{cost.least_ms(d):.2f}" for d in DEVICES)
            for cost in (costs[name][case] for name in SHOWN)
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", conversations(SHAPES["3b"])])


def conversations(shape: Shape) -> str:
    """Minimum times of the last turn of a conversation, by what is cached."""
    device = DEVICES[0]
    first = "first token: nothing cached | embeddings cached | prefix, too"
    lines = [
        f"| 3b, {device.name}, turn {TURNS[-1]}, ms | encode all | encode new | {first} |",
        "|---" * 6 + "|",
    ]
    for label, size in IMAGES.items():
        patches = patches_of(size)
        new = patches // 4 + TEXT_TOKENS
        every = shape.encode(patches, TURNS[-1]).least_ms(device)
        one = shape.encode(patches, 1).least_ms(device)
        whole = shape.prefill(0, new * TURNS[-1]).least_ms(device)
        last = shape.prefill(new * (TURNS[-1] - 1), new).least_ms(device)
        lines.append(
            f"| {label} | {every:.1f} | {one:.1f} "
            f"| {every + whole:.1f} | {one + whole:.1f} | {one + last:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables into the page, or print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.roofline", description=__doc__)
    parser.add_argument("--page", default=str(PAGE), help="the page to change, - to print")
    options = parser.parse_args()
    if options.page == "-":
        print(roofline())
        return
    path = Path(options.page)
    path.write_text(replaced(path.read_text(), roofline(), mark="roofline"))


if __name__ == "__main__":
    main()
