"""The comparison of all architectures on another device than a CPU, in several processes."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from pathlib import Path

import msgspec
import torch
import transformers
from transformers.utils import logging

from tests.bench.gpu.revision import revision_of
from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES
from tests.parity.compare import compare
from tests.parity.vision_architectures import VISION_ARCHITECTURES, VISION_REFUSED
from tests.parity.vision_compare import compare_own, compare_vision
from tests.workers.backends.cuda.on_host import install

EQUAL, NOT_RUN = "equal", "not run"
RECORDED = Path(__file__).parent / "cuda.json"
ON_HOST = "cuda-on-host"
"""The code of the CUDA backend on a CPU; see `tests/workers/backends/cuda/on_host.py`."""

ROOT = Path(__file__).parents[2]


class DeviceResults(msgspec.Struct):
    """Results on a device: `equal`, the unequal runs, or an error, by architecture."""

    device: str
    versions: dict[str, str]
    commit: str
    rows: dict[str, str]


def recorded() -> DeviceResults:
    """Return the results on a GPU that are kept with the tests."""
    if not RECORDED.exists():
        return DeviceResults("", {}, "", {})
    return msgspec.json.decode(RECORDED.read_bytes(), type=DeviceResults)


def record(file: Path) -> None:
    """Keep results of `compare_on_device` with the tests."""
    found = msgspec.json.decode(file.read_bytes(), type=DeviceResults)
    RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def compare_on_device(names: Sequence[str], device: str, *, jobs: int, to: Path | None) -> int:
    """Compare all architectures on a device; write each result at once, and return the number of differences."""
    seeing = [name for name in VISION_ARCHITECTURES if name not in VISION_REFUSED]
    rows = {
        **{name: (name, False) for name in [*FAMILY_SIZES, *ARCHITECTURES]},
        **{f"{name} with images": (name, True) for name in [*FAMILY_SIZES, *seeing]},
    }
    results = DeviceResults(_name_of(device), _versions(), revision_of(ROOT, None), {})
    found = results.rows
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        waiting = {
            pool.submit(functools.partial(result_of, device=device), *each): row
            for row, each in rows.items()
            if not names or each[0] in names
        }
        for done in as_completed(waiting):
            try:
                found[waiting[done]] = done.result()
            except BrokenProcessPool:  # this or another architecture ended a process
                found[waiting[done]] = _alone(context, *rows[waiting[done]], device=device)
            print(f"{waiting[done]}: {found[waiting[done]]}", flush=True)
            if to is not None:
                results.rows = found = dict(sorted(found.items()))
                to.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return sum(each != EQUAL for each in found.values())


def _alone(context: BaseContext, name: str, sees: bool, *, device: str) -> str:
    """Return the result of an architecture from a process of its own, which may end."""
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(result_of, name, sees, device=device).result()
        except BrokenProcessPool:
            return "its process ended"


def result_of(name: str, sees: bool, *, device: str) -> str:  # a pool passes it
    """Compare one architecture in this process; return `equal`, the unequal runs, or the error."""
    logging.disable_progress_bar()
    if device == ON_HOST:
        install()
        device = "cpu"
    try:
        if not sees:
            parity = compare(name, device=device)
        elif name in FAMILY_SIZES:
            parity = compare_own(name, device=device)
        else:
            parity = compare_vision(name, device=device)
    except Exception as error:  # noqa: BLE001  # one architecture must not end the others
        return f"{type(error).__name__}: {str(error)[:300]}"
    return f"unequal: {', '.join(parity.unequal)}" if parity.unequal else EQUAL


def _name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda:") else device


def _versions() -> dict[str, str]:
    return {"torch": str(torch.__version__), "transformers": transformers.__version__}
