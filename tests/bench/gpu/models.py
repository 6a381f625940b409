"""Worker performance on a GPU, compared with its limits: `python -m tests.bench.gpu.models --out FOLDER`.

Models of real shapes with random weights run behind the worker contract, without a server. Every
step is compared with the time for its bytes at the measured bandwidth, or for its operations at the
measured rate of a large product, whichever is longer (`costs.py`). The conversation table shows the
effect of an embedding cache: turn k of a conversation contains k images, of which all or only the
new one must be encoded.

Needs a GPU with 40 GB for both shapes; `--few` measures the most important cases.
`--device cpu --models nano` tests the script itself.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.bench.gpu import costs
from tests.bench.gpu.costs import IMAGES, SHAPES, Cost, Device, patches_of
from tests.bench.gpu.load import TEXT_TOKENS, Load
from tests.bench.gpu.shapes import Model, make_model
from tests.bench.gpu.tables import FIGURES, Figures, Row, tables

SQUARE = {"cuda": 8192, "cpu": 256}
PARTS = ("steps", "conversations")
LONG_MS, FEW_RUNS = 50.0, 2
"""A call of this duration varies little: it is measured this often after a single warm-up."""
EAGER_STEPS, EAGER_WARM = 12, 2


class Watch:
    """Times calls on a device; medians of runs, in milliseconds."""

    def __init__(self, device: str, *, repeats: int) -> None:
        self._cuda = device != "cpu"
        self._repeats = repeats

    def wall_ms(self, run: Callable[[], object], *, repeats: int = 0, warm: int = 3) -> float:
        """Return the median time of a call, including the device's work; long calls have fewer repeats."""
        self._timed_ms(run)  # kernels may be compiled
        first_ms = self._timed_ms(run)
        if first_ms > LONG_MS:
            return statistics.median(
                [first_ms, *(self._timed_ms(run) for _ in range(FEW_RUNS - 1))]
            )
        for _ in range(warm - 2):
            run()
        return statistics.median(self._timed_ms(run) for _ in range(repeats or self._repeats))

    def _timed_ms(self, run: Callable[[], object]) -> float:
        self._settle()
        started_s = time.perf_counter()
        run()
        self._settle()
        return (time.perf_counter() - started_s) * 1e3

    def each_ms(self, run: Callable[[], object], *, count: int, warm: int) -> float:
        """Return the median time between returns of consecutive calls, which may be asynchronous."""
        for _ in range(warm):
            run()
        self._settle()
        times, before_s = [], time.perf_counter()
        for _ in range(count):
            run()
            now_s = time.perf_counter()
            times.append((now_s - before_s) * 1e3)
            before_s = now_s
        self._settle()
        return statistics.median(times)

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def ceilings(device: str, dtype: torch.dtype, watch: Watch) -> tuple[float, float]:
    """Return the bytes per second of a large copy, and the operations per second of a large product."""
    side = SQUARE[device.partition(":")[0]]
    source = torch.empty(16 * side * side, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = watch.wall_ms(lambda: target.copy_(source), repeats=10)
    one = torch.randn(side, side, device=device, dtype=dtype)
    other = torch.randn(side, side, device=device, dtype=dtype)
    product_ms = watch.wall_ms(lambda: one @ other, repeats=10)
    return 2 * len(source) / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3


@dataclass(kw_only=True)
class ModelBench:
    """Measures one model.

    Attributes:
        device: This device, with its measured rates.
        full: False if the shapes are tiny.
        few: Whether to leave out cases.
        wrote: Called with all rows after each measurement.
    """

    name: str
    model: Model
    watch: Watch
    device: Device
    full: bool
    few: bool
    weights: str
    wrote: Callable[[list[Row]], object]
    rows: list[Row] = field(default_factory=list)
    failed: int = 0

    def run(self, part: str) -> None:
        """Measure a part: single steps, or the turns of conversations; an error of a case does not end the others."""
        for measure, *case in self._cases(part):
            try:
                measure(*case)
            except Exception:  # noqa: BLE001  # also of a driver or a compiler
                self.failed += 1
                traceback.print_exc()

    def _cases(self, part: str) -> Iterator[tuple[Any, ...]]:
        images = IMAGES if self.full else {"tiny": (112, 112)}
        if part == "conversations":
            turns = costs.TURNS[-1:] if self.few else costs.TURNS
            for image, turn in itertools.product(images.items(), turns):
                yield self._conversation, *image, turn
            return
        decodes = costs.FEW_DECODES if self.few else costs.DECODES
        if self.weights != "auto":  # affects steps with few rows only
            decodes = costs.QUANTIZED_DECODES
        for rows, context in decodes if self.full else [(1, 32), (3, 32)]:
            yield self._decode, rows, context
        if self.weights == "auto":
            for first, rows in costs.PREFILLS if self.full else [(0, 32), (32, 32)]:
                yield self._prefill, first, rows
            for image in images.items():
                yield self._encode, *image

    def _note(self, case: str, found_ms: float, cost: Cost | None, **more: float) -> None:
        floor_ms = None
        if cost is not None:
            floor_ms = cost.least_ms(self.device)
            more |= {"moved": cost.moved, "operations": cost.operations}
        self.rows.append(Row(self.name, case, found_ms, floor_ms, more))
        self.wrote(self.rows)
        print(f"{self.name} {case}: {found_ms:.2f} ms", flush=True)

    def _decode(self, batch: int, context: int) -> None:
        """Measure a decode step with `batch` rows, with CUDA graphs and eagerly."""
        model, worker = self.model, self.model.language
        steps, warm = (64, 8) if self.full else (4, 1)
        load = Load(model, slots=batch, context=context + 2 * (steps + warm) + 16)
        found = self.watch.each_ms(load.decode_rows(context).step, count=steps, warm=warm)
        worker.drop_graphs()
        rows = load.decode_rows(context)
        eager = self.watch.each_ms(rows.step, count=EAGER_STEPS, warm=EAGER_WARM)
        size = model.info.itemsize
        kind = self.weights
        cost = model.shape.decode(batch, context, bytes_a_value=size, weights=kind)
        case = f"decode {batch} x {context}" + ("" if kind == "auto" else f" {kind}")
        self._note(case, found, cost, eager_ms=eager)

    def _prefill(self, first: int, rows: int) -> None:
        """Measure a chunk of `rows` tokens after `first` tokens."""
        load = Load(self.model, slots=1, context=first + rows + 16)
        found = self.watch.wall_ms(load.prefill(first, rows), repeats=5)
        cost = self.model.shape.prefill(first, rows, bytes_a_value=self.model.info.itemsize)
        self._note(f"prefill {rows} after {first}", found, cost)

    def _encode(self, label: str, size: tuple[int, int]) -> None:
        load = Load(self.model, slots=1, context=64)
        found = self.watch.wall_ms(load.encode(size, 1), repeats=5)
        patches = patches_of(size)
        cost = self.model.shape.encode(patches, 1, bytes_a_value=self.model.info.itemsize)
        self._note(f"encode {label}", found, cost, tokens=patches // 4)

    def _conversation(self, label: str, size: tuple[int, int], turn: int) -> None:
        """Encode and prefill of one turn: everything, with an embedding cache, and with a prefix cache as well."""
        tokens = (patches_of(size) // 4 + TEXT_TOKENS) * turn
        load = Load(self.model, slots=1, context=tokens + 16)
        every = self.watch.wall_ms(load.encode(size, turn), repeats=3, warm=1)
        one = self.watch.wall_ms(load.encode(size, 1), repeats=3, warm=1)
        whole = self.watch.wall_ms(load.prefill(0, tokens, size), repeats=3, warm=1)
        new = tokens // turn
        last = self.watch.wall_ms(load.prefill(tokens - new, new, size), repeats=3, warm=1)
        self._note(
            f"conversation {label} turn {turn}",
            one,
            None,
            encode_all_ms=every,
            first_token_all_ms=every + whole,
            first_token_embeddings_ms=one + whole,
            first_token_prefix_ms=one + last,
        )


def _write(file: Path, name: str, before: Figures, rows: list[Row]) -> Figures:
    """Write all results so far, since the next case may hang; keep the results under other names."""
    found = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    figures = msgspec.structs.replace(before, rows=[*before.rows, *rows])
    encoded = msgspec.json.encode({**found, name: figures})
    new = file.with_suffix(".new")  # a step that is ended here must not break the next one
    new.write_bytes(msgspec.json.format(encoded, indent=1))
    new.replace(file)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.models", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FIGURES}")
    parser.add_argument("--models", default="3b,7b", help="of: " + ", ".join(SHAPES))
    parser.add_argument("--weights", default="auto", help="of: auto, int8, int4")
    parser.add_argument("--parts", default="steps", help="of: " + ", ".join(PARTS))
    parser.add_argument("--few", action="store_true", help="the most important cases only")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    watch = Watch(options.device, repeats=2 if on_cpu else 20)
    bandwidth, rate = ceilings(options.device, dtype, watch)
    name = "cpu" if on_cpu else torch.cuda.get_device_name(options.device)
    figures = Figures(
        device=name, torch=str(torch.__version__), bandwidth=bandwidth, rate=rate, rows=[]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    case = f"{options.models} {options.parts} {options.weights}"
    write = functools.partial(_write, options.out / FIGURES, case)
    failed = 0
    for one, kind in itertools.product(options.models.split(","), options.weights.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(one, Path(folder), options.device, dtype, weights=kind)
            bench = ModelBench(
                name=one,
                model=model,
                watch=watch,
                device=Device("here", bandwidth, rate),
                full=one != "nano",
                few=options.few,
                weights=kind,
                wrote=functools.partial(write, figures),
            )
            for part in options.parts.split(","):
                bench.run(part)
        figures = write(figures, bench.rows)
        failed += bench.failed
        model.language.drop_kv()
        del model, bench
    print(tables(figures))
    sys.exit(failed)


if __name__ == "__main__":
    main()
