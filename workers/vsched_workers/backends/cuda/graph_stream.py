"""The graph stream: a CUDA stream of its own on which captured decode steps run, beside everything else.

Where one process serves both stages, images are encoded on the stream that is current, and a decode step that was
started on the graph stream goes on meanwhile. Prefill reads and writes the same KV cache as decode, so the two wait for
each other: `DecodeGraphs` says when.

Not yet run on a GPU. Tests put another stream in its place: one that runs things late, as a GPU may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], torch.Tensor]
Act = Callable[[], None]


class GraphStream(Protocol):
    """Runs captured steps in the order in which they are started; only methods that say so wait."""

    def host(self, *shape: int) -> torch.Tensor:
        """Return host memory, int32, that `upload` and `download` may use."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        """Copy from the host to the device; returns what waits until the source is no longer read."""
        ...

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        """Copy from the device to the host; returns what waits until the target is there."""
        ...

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        """Record what `run` starts; returns what starts it again, and the tensor that `run` gave: always the same one.

        Blocks: while it runs once, so that nothing is compiled or allocated for good while it is recorded.
        """
        ...

    def start(self, replay: Act) -> None:
        """Start what was captured."""
        ...

    def wait_for_others(self) -> None:
        """Have what is started here from now on wait for what was started elsewhere before."""
        ...

    def let_others_wait(self) -> None:
        """Have what is started elsewhere from now on wait for what was started here before."""
        ...

    def forget(self) -> None:
        """Give back what was captured."""
        ...


class CudaGraphStream:
    """A stream of high priority, CUDA graphs that share a pool of memory, copies that the host does not wait for."""

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
        # Other threads of the process may do as they like: they use no GPU, and a capture is none of their business.
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
    """Return the numbers of rows that steps are captured for, ascending: powers of two, and the most there can be."""
    counts = [1 << power for power in range(rows_max.bit_length()) if 1 << power < rows_max]
    return [*counts, rows_max]
