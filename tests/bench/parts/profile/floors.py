"""Lower bounds of component costs on this machine: bytes over bandwidth, operations over the rate of matrix products.

`python -m tests.bench.parts.profile.floors` measures the machine with one thread and writes the result
as JSON. The floors are rough by design: they leave out small terms, so that the gap to them is
never understated.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

_COPY_BYTES = 256 << 20
_PRODUCT_SIZE = 1024
_MESSAGE_BYTES = 200
_MESSAGES = 2000
_ROUNDS = 5
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one core, the best of several rounds.

    Attributes:
        bytes_s: Bytes read and written by a copy larger than the caches.
        operations_s: Operations of a float32 matrix product.
        message_s: Time to send or receive a short message over a local socket.
    """

    bytes_s: float
    operations_s: float
    message_s: float


class LoadWork(msgspec.Struct, frozen=True, kw_only=True):
    """Total work of a load: the minimum that its components must move and compute.

    Attributes:
        body_bytes: Request bodies, as sent over the network.
        pixel_bytes: Images, decoded and processed.
        chunks: Pieces of output written.
        steps: Steps of the generate ranks.
        prompt_tokens: Total prompt tokens computed by the language model, at most.
        context_tokens: Mean length of a sequence while it decodes.
        logit_bytes: Size of one row of logits.
        weight_bytes: Weights of the language model.
        itemsize: Bytes per weight.
        patches: Patches encoded by the vision tower.
        tower_bytes: Weights of the vision tower.
    """

    body_bytes: int
    pixel_bytes: int
    chunks: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    context_tokens: float
    kv_bytes_per_token: int
    logit_bytes: int
    weight_bytes: int
    itemsize: int
    patches: int = 0
    tower_bytes: int = 0


def floors(work: LoadWork, machine: MachineRates) -> dict[str, float]:
    """Return the minimum seconds of each component for the whole load; components without a bound are left out."""
    parameters = work.weight_bytes / work.itemsize
    tokens = work.prompt_tokens + work.output_tokens
    kv_bytes = work.output_tokens * work.context_tokens * work.kv_bytes_per_token
    moved_s = (work.steps * work.weight_bytes + kv_bytes) / machine.bytes_s
    computed_s = 2 * parameters * tokens / machine.operations_s
    tower_parameters = work.tower_bytes / work.itemsize
    return {
        "http": work.body_bytes / machine.bytes_s,
        "preprocessing": (work.body_bytes + work.pixel_bytes) / machine.bytes_s,
        "transport": 2 * work.steps * machine.message_s,
        "writing": work.chunks * machine.message_s,
        "model": max(moved_s, computed_s),
        "sampling": work.output_tokens * work.logit_bytes / machine.bytes_s,
        "vision": 2 * tower_parameters * work.patches / machine.operations_s,
    }


def measure_machine() -> MachineRates:
    """Measure this machine in a separate process with single-threaded libraries."""
    command = [sys.executable, "-m", "tests.bench.parts.profile.floors"]
    environment = {**os.environ, **_ONE_THREAD}
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout, type=MachineRates)


def _best_s(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def _message_s() -> float:
    near, far = socket.socketpair()
    content = bytes(_MESSAGE_BYTES)

    def exchange() -> None:
        for _ in range(_MESSAGES):
            near.send(content)
            far.recv(_MESSAGE_BYTES)

    with near, far:
        return _best_s(exchange) / (2 * _MESSAGES)


def _measure() -> MachineRates:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    square = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    return MachineRates(
        bytes_s=2 * _COPY_BYTES / _best_s(lambda: np.copyto(target, source)),
        operations_s=2 * _PRODUCT_SIZE**3 / _best_s(lambda: square @ square),
        message_s=_message_s(),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure()))
