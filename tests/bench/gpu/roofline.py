"""Minimum time of each step on two devices, before anything is measured: `python -m tests.bench.gpu.roofline`.

It writes between the two comments of `docs/gpu.md`; `--page -` prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench.gpu.costs import DEVICES, IMAGES, SHAPES, TURNS, Shape, cases, patches_of
from tests.bench.gpu.page import replaced

PAGE = Path(__file__).parents[3] / "docs/gpu.md"
SHOWN = ("3b", "7b")
TEXT_TOKENS = 64


def roofline() -> str:
    """Return the tables as Markdown."""
    parts = []
    for name in SHOWN:
        shape = SHAPES[name]
        heads = " | ".join(f"{device.name} ms" for device in DEVICES)
        lines = [f"| {name} | GB | TFLOP | bound by | {heads} |", "|---|---|---|---|---|---|"]
        for case, cost in cases(shape).items():
            by = {
                "bytes" if cost.moved / one.bandwidth > cost.operations / one.rate else "operations"
                for one in DEVICES
            }
            times = " | ".join(f"{cost.least_ms(device):.2f}" for device in DEVICES)
            sizes = f"{cost.moved / 1e9:.2f} | {cost.operations / 1e12:.3f}"
            lines.append(f"| {case} | {sizes} | {', '.join(sorted(by))} | {times} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, conversations(SHAPES["3b"])])


def conversations(shape: Shape) -> str:
    """Return the minimum savings of caches per turn: encoding, and time to first token."""
    device = DEVICES[0]
    first = "first token: nothing cached | embeddings cached | prefix, too"
    head = f"| 3b, {device.name}, ms | encode all | encode new | ratio | {first} |"
    lines = [head, "|---" * 7 + "|"]
    for label, size in IMAGES.items():
        patches = patches_of(size)
        new = patches // 4 + TEXT_TOKENS
        for turn in TURNS:
            every = shape.encode(patches, turn).least_ms(device)
            one = shape.encode(patches, 1).least_ms(device)
            whole = shape.prefill(0, new * turn).least_ms(device)
            last = shape.prefill(new * (turn - 1), new).least_ms(device)
            lines.append(
                f"| {label} turn {turn} | {every:.1f} | {one:.1f} | {every / one:.1f} "
                f"| {every + whole:.1f} | {one + whole:.1f} | {one + last:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables."""
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
