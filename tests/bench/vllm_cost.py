"""Cost of the bridge: `python -m tests.bench.vllm_cost`, with the python of an environment with vLLM.

Steps of vLLM's own scheduler and of the one with policies are timed in turns, in thread CPU time, so that other
programs disturb both alike.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.vllm.driving import make_request, make_scheduler, worker, write_model
from tests.vllm.test_scheduler import FAIR, FIFO, SHORTEST

STEPS = 300


def step(scheduler: Any) -> tuple[float, float]:
    """Return µs of `schedule()`, and of the step with its results."""
    began = time.thread_time_ns()
    output = scheduler.schedule()
    scheduled = time.thread_time_ns()
    done = {
        name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
    }
    results = worker(output, done)
    resumed = time.thread_time_ns()
    scheduler.update_from_output(output, results)
    ended = time.thread_time_ns()
    return (scheduled - began) / 1e3, (scheduled - began + ended - resumed) / 1e3


def loaded(model: str, tables: Any, running: int, waiting: int) -> Any:
    """Return a scheduler with `running` decoding requests, and `waiting` ones that wait for blocks."""
    rng = random.Random(1)
    blocks = running * 80 + 100
    scheduler = make_scheduler(
        model, tables, slots=running + 8, tokens=max(2048, running * 160), blocks=blocks
    )
    for index in range(running):
        prompt = [rng.randrange(10, 4000) for _ in range(128 + index % 16)]
        scheduler.add_request(make_request(f"r{index}", prompt, 1100, tenant=f"t{index % 8}"))
    for _ in range(5):
        step(scheduler)
    for index in range(waiting):
        prompt = [rng.randrange(10, 4000) for _ in range(7000)]
        scheduler.add_request(make_request(f"w{index}", prompt, 10, tenant=f"t{index % 8}"))
    for _ in range(5):
        step(scheduler)
    return scheduler


def main() -> None:
    model = write_model(Path(tempfile.mkdtemp()))
    sides = {"vLLM": None, "none": {}, "fifo": FIFO, "shortest": SHORTEST, "fair": FAIR}
    print(
        "running / waiting: µs of schedule(), and of schedule() and update_from_output(), p50; ratio"
    )
    for running, waiting in ((1, 0), (64, 0), (256, 0), (64, 64), (64, 512)):
        schedulers = {
            name: loaded(model, tables, running, waiting) for name, tables in sides.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        gc.collect()
        gc.disable()
        for turn in range(STEPS):
            names = list(sides)
            random.Random(turn).shuffle(names)
            for name in names:
                times[name].append(step(schedulers[name]))
        gc.enable()
        base = [statistics.median(column) for column in zip(*times["vLLM"], strict=True)]
        for name, measured in times.items():
            found = [statistics.median(column) for column in zip(*measured, strict=True)]
            ratios = [one / of for one, of in zip(found, base, strict=True)]
            print(
                f"{running:4} / {waiting:3}  {name:9} {found[0]:8.1f} {found[1]:8.1f}   "
                f"{ratios[0]:.3f} {ratios[1]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
