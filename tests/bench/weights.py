"""Speed of matrix products with quantized weights, and their effect on logits.

    python -m tests.bench.weights
    python -m tests.bench.weights --rows
    python -m tests.bench.weights --logits CHECKPOINT [--calibration FILE]

The first measures, in one run, the memory read rate; the time for one row compared with the time to
read the weights' bytes at that rate; and the time for more rows compared with the same rows in
bfloat16. Weights are used in turn, so that none stays in a cache. Weights of 8 and 4 bits are
multiplied with float and 8-bit activations, with AMX as by default, many rows in tiles. torch's
products for such weights are included. The second shows the time and rate by number of rows, to
find those with poor performance. The third runs the exam questions on a checkpoint with and without
quantized weights, with and without a calibration file, or with an 8-bit KV cache, fed with the same
tokens.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vsched_workers.backends.cpu.products import make_product
from vsched_workers.backends.cpu.tiles.kernel import has_tiles
from vsched_workers.quantized.weights import quantize

SHAPES = ((1024, 4096), (4096, 1024), (576, 1536))
"""Inputs and outputs, of mid25 and SmolLM2-135M."""
FORMATS = (("bfloat16", 0), ("int8", 128), ("int8", 32), ("int4", 128), ("int4", 32))
MORE_ROWS = (8, 32, 128, 512)
ALL_ROWS = (1, 2, 4, 8, 9, 16, 24, 32, 48, 64, 128, 256, 512)
IN_TURN_BYTES = 96 << 20
READ_BYTES = 512 << 20

Rows = Callable[[torch.Tensor], torch.Tensor]


def best_s(call: Callable[[], object], repeats: int) -> float:
    """Return the minimum seconds over some calls, after a warm-up."""
    call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def read_rate(repeats: int) -> float:
    """Return the memory read rate of torch's threads in bytes per second."""
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / best_s(memory.sum, repeats)


def in_turn(products: Sequence[Rows], rows: torch.Tensor, repeats: int) -> float:
    """Return the seconds of one product, with the weights used in turn."""
    return best_s(lambda: [product(rows) for product in products], repeats) / len(products)


def products_of(
    weight: torch.Tensor,
    kind: str,
    group: int,
    threads: int,
    *,
    int8_activations: bool = False,
    tiles: bool = False,
) -> tuple[list[Rows], int]:
    """Return copies of a product, and the size of one in bytes."""
    made = weight if kind == "bfloat16" else quantize(weight, kind, group=group)
    make = functools.partial(
        make_product, threads=threads, int8_activations=int8_activations, tiles=tiles
    )
    first = make(made, None)
    copies = max(IN_TURN_BYTES // first.size_bytes, 1)
    return [first, *(make(made, None) for _ in range(1, copies))], (first.size_bytes)


def torch_products(weight: torch.Tensor) -> dict[str, tuple[list[Rows], int]]:
    """Return torch's products for such weights: with its own groups, and bfloat16 scales."""
    outputs, inputs = weight.shape
    operations: Any = torch.ops.aten
    values = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.rand(outputs).bfloat16()
    levels = torch.randint(0, 16, weight.shape, dtype=torch.int32)
    packed: torch.Tensor = operations._convert_weight_to_int4pack_for_cpu(levels, 2)
    grid = torch.rand(inputs // 32, outputs, 2).bfloat16()

    def by_int8(each: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = operations._weight_int8pack_mm(rows, each, scales)
        return product

    def by_int4(each: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        multiply = operations._weight_int4pack_mm_for_cpu
        product: torch.Tensor = multiply(rows, each, 32, grid)
        return product

    return {
        "torch int8, rows": _copies(by_int8, values),
        "torch int4, 32": _copies(by_int4, packed),
    }


def _copies(call: Callable[..., torch.Tensor], weight: torch.Tensor) -> tuple[list[Rows], int]:
    count = max(IN_TURN_BYTES // weight.nbytes, 1)
    return [functools.partial(call, weight.clone()) for _ in range(count)], weight.nbytes


def products_table(threads: int, repeats: int) -> Table:
    """Measure all formats and shapes."""
    torch.set_num_threads(threads)
    table = Table("in x out", "format", "bits", "1 row, ms", "of its bytes", title="")
    for count in MORE_ROWS:
        table.add_column(f"{count} rows, of bfloat16")
    rate = 0.0
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        made = {f"{k}, {g}" if g else k: products_of(weight, k, g, threads) for k, g in FORMATS}
        for kind, group in FORMATS[1:]:
            found = products_of(weight, kind, group, threads, int8_activations=True)
            made[f"{kind}, {group}, rows int8"] = found
            if has_tiles():
                made[f"{kind}, {group}, by default"] = products_of(
                    weight, kind, group, threads, int8_activations=True, tiles=True
                )
        base: dict[int, float] = {}
        for name, (products, size) in (made | torch_products(weight)).items():
            now = read_rate(3)
            rate = max(rate, now)
            one = in_turn(products, torch.randn(1, inputs).bfloat16(), repeats)
            cells = [f"{inputs:,} x {outputs:,}", name, f"{8 * size / weight.numel():.2f}"]
            cells += [f"{1e3 * one:.3f}", f"{one * now / size:.2f}"]
            for count in MORE_ROWS:
                took = in_turn(products[:8], torch.randn(count, inputs).bfloat16(), 3)
                base.setdefault(count, took)
                cells.append(f"{took / base[count]:.2f}")
            table.add_row(*cells)
    table.title = f"{threads} threads; memory read at up to {rate / 1e9:.1f} GB/s"
    return table


def rows_table(threads: int, repeats: int) -> Table:
    """Measure numbers of rows by weights in bfloat16 and int8: milliseconds, and GFLOPS."""
    torch.set_num_threads(threads)
    table = Table("in x out", "rows", title=f"{threads} threads; ms, and GFLOPS")
    kinds = (("bfloat16", 0), ("int8", 128))
    for kind, _ in kinds:
        table.add_column(kind)
        table.add_column("")
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        made = [
            products_of(weight, *kind, threads, int8_activations=True, tiles=has_tiles())[0]
            for kind in kinds
        ]
        for count in ALL_ROWS:
            cells = [f"{inputs:,} x {outputs:,}", str(count)]
            rows = torch.randn(count, inputs).bfloat16()
            for products in made:
                took = in_turn(products[: max(256 // count, 2)], rows, repeats)
                cells.append(f"{1e3 * took:.3f}")
                cells.append(f"{2 * count * inputs * outputs / took / 1e9:.0f}")
            table.add_row(*cells)
    return table


def logits_table(path: str, calibration: str) -> Table:
    """Return the difference of logits from those of unquantized weights, and the number of right answers.

    Each format is also calibrated, if there is a calibration file.
    """
    from tests.bench.weights_logits import ask

    table = Table("weights", "logits apart", "same first choice", "right answers", title=path)
    lines = [("as they are", ask(path, "auto", 0))]
    lines.append(("as they are, KV int8", ask(path, "auto", 0, kv_dtype="int8")))
    for kind, group in FORMATS[1:]:
        for activations, suffix in (("float", ""), ("int8", ", rows int8")):
            reported = ask(path, kind, group, activations=activations)
            lines.append((f"{kind}, {group}{suffix}", reported))
        if calibration:
            reported = ask(path, kind, group, calibration=calibration)
            lines.append((f"{kind}, {group}, calibrated", reported))
    for name, reported in lines:
        row = (
            f"{100 * reported.apart:.2f} %",
            f"{100 * reported.same:.2f} %",
            f"{reported.right} of {reported.requested}",
        )
        table.add_row(name, *row)
    return table


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--rows", action="store_true", help="numbers of rows, by weights of 16 and 8 bits"
    )
    parser.add_argument("--logits", metavar="CHECKPOINT", default="")
    parser.add_argument("--calibration", metavar="FILE", default="")
    given = parser.parse_args()
    console = Console(width=150)
    if given.logits:
        console.print(logits_table(given.logits, given.calibration))
    elif given.rows:
        console.print(rows_table(given.threads, given.repeats))
    else:
        console.print(products_table(given.threads, given.repeats))


if __name__ == "__main__":
    main()
