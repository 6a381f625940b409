"""Prove the encoder's reservation: `python -m tests.reservation CHECKPOINT --tokens 128 256 512 --batches 1000`.

Prints a table, a line for each budget, and ends with status 1 if a batch needed more than was reserved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.reservation.run import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.reservation", description=__doc__)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="budgets")
    parser.add_argument(
        "--batches", type=int, default=1000, help="number of batches for each budget"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of a run")
    parser.add_argument(
        "--blocks",
        type=int,
        default=0,
        help="run only this number of blocks of the tower, the last over whole images, to save time",
    )
    parser.add_argument("--out", type=Path, help="a file to write the table to")
    options = parser.parse_args()
    mib = 1 << 20
    lines = [
        "| checkpoint | budget | batches | reserved MiB | most needed MiB | above |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    failed = False
    for tokens in options.tokens:
        found = run(
            options.checkpoint,
            tokens=tokens,
            batches=options.batches,
            seed=options.seed,
            blocks=options.blocks,
            timeout_s=None,
        )
        failed |= found.above > 0
        lines.append(
            f"| {Path(options.checkpoint).name} | {found.tokens} | {found.batches} "
            f"| {found.reserved_bytes / mib:.1f} "
            f"| {found.most_bytes / mib:.1f} | {found.above} |"
        )
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(failed)
