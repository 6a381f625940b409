"""Clients in a separate process, started by the server's process; see `client_process_main.py`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import msgspec

from vsched.bench.load.client import BenchError
from vsched.bench.load.client_process_main import LoadOrder
from vsched.bench.load.figures import Figures

CLIENTS_S = 1800.0
"""Timeout of warm-up, and of a run."""


@contextlib.asynccontextmanager
async def ready_clients(order: LoadOrder) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start clients and warm up; yields their process, which waits for `begin_clients` or `run_clients`.

    Raises:
        BenchError: When warm-up failed.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "vsched.bench.load.client_process_main",
            msgspec.json.encode(order),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if await _line_of(process) != b"ready\n":
            raise BenchError("the clients could not warm up. Remedy: see their output above.")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def begin_clients(process: asyncio.subprocess.Process) -> None:
    """Start the load."""
    assert process.stdin is not None
    process.stdin.write(b"go\n")


async def figures_of(process: asyncio.subprocess.Process) -> Figures:
    """Return the clients' figures when they have finished.

    Raises:
        BenchError: When a request failed.
    """
    answer = await _line_of(process)
    if not answer:
        raise BenchError("the clients ended early. Remedy: see their output above.")
    figures = msgspec.json.decode(answer, type=Figures)
    if figures.failed:
        raise BenchError(f"{figures.failed} requests failed, most often: {figures.errors[0]}")
    return figures


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CLIENTS_S):
            return await process.stdout.readline()
    except TimeoutError:
        raise BenchError(f"the clients were not through after {CLIENTS_S:g} s") from None


async def run_clients(process: asyncio.subprocess.Process) -> Figures:
    """Start the load, and return the clients' figures.

    Raises:
        BenchError: When a request failed.
    """
    begin_clients(process)
    return await figures_of(process)
