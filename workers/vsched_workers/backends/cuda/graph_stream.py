"""The graph stream: a separate CUDA stream for captured decode steps.

If one process serves both stages, images are encoded on the current stream, while a decode step on the graph stream
continues. Prefill reads and writes the same KV cache as decode, so the two wait for each other, as `DecodeGraphs`
decides.

Tests without a GPU use another stream instead, which delays its work, as a GPU may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], torch.Tensor]
Act = Callable[[], None]


class GraphStream(Protocol):
    """Runs captured steps in the order in which they are started; only the methods marked so block."""

    def host(self, *shape: int) -> torch.Tensor:
        """Return host memory, int32, for `upload` and `download`."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        """Copy from the host to the device; return a function that waits until the source is no longer read."""
        ...

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        """Copy from the device to the host; return a function that waits until the target is complete."""
        ...

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        """Capture `run`; return a function that replays it, and the tensor that `run` returned, which is reused.

        Blocks: during one eager run first, so that nothing is compiled or permanently allocated in the capture.
        """
        ...

    def start(self, replay: Act) -> None:
        """Start a captured step."""
        ...

    def wait_for_others(self) -> None:
        """Make later work on this stream wait for earlier work on other streams."""
        ...

    def let_others_wait(self) -> None:
        """Make later work on other streams wait for earlier work on this stream."""
        ...

    def forget(self) -> None:
        """Free the captured steps."""
        ...


class CudaGraphStream:
    """A high-priority stream, CUDA graphs with a shared memory pool, and asynchronous copies."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream: Any = torch.cuda.Stream(device=self._device, priority=-1)
        self._graphs: list[Any] = []
        self._pool: Any = None

    def host(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        return self._copy(source, target)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        return self._copy(source, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        done: Any = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return _waiting(done)

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        self.wait_for_others()
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads of the process do not use the GPU, and must not invalidate the capture.
        recording: Any = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with recording:
            result = run()
        self._graphs.append(graph)
        replay: Act = graph.replay
        return replay, result

    def start(self, replay: Act) -> None:
        with torch.cuda.stream(self._stream):
            replay()

    def wait_for_others(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def let_others_wait(self) -> None:
        current: Any = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)

    def forget(self) -> None:
        self._stream.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None


def _waiting(event: Any) -> Act:
    def wait() -> None:
        event.synchronize()

    return wait


def row_counts(rows_max: int) -> Sequence[int]:
    """Return the batch sizes to capture, ascending: powers of two, and the largest batch."""
    counts = [1 << power for power in range(rows_max.bit_length()) if 1 << power < rows_max]
    return [*counts, rows_max]
