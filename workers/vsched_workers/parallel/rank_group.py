"""The group of ranks that share a model: collectives, and agreement on failures.

A rank that runs out of memory in the middle of a step leaves the others waiting in a collective. So every step is an
attempt of the whole group: it begins when all are connected and ends with a vote. A rank that fails records the reason
in the store where the ranks met, and closes its connections; the others notice that at once, read the reason, and fail
likewise. The next attempt connects again, in a store of the next *epoch*. Every rank counts the failures, and the vote
makes the counts equal, so no rank ever retries alone between two collectives, or mistakes data of another step for this
one's.

Everything here happens at the same place of the decision log on every rank. If one process serves two stages, each has
its own group.

The backend provides the communication. On a CPU, with gloo, small tensors are sent to all ranks and summed in the order
of the ranks, which takes a third of the time of gloo's own sum and gives every rank bit-identical results; so does
gloo's sum, which is used for larger tensors of more than two ranks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed

from vsched.errors import DeviceOutOfMemory, PeerLost, RankDesync
from vsched.worker.contract import WorkerSettings
from vsched.worker.memory import DeviceMemory

logger = logging.getLogger(__name__)
TIMEOUT_S = 120.0
"""Timeout of one collective, and of connecting."""

EXCHANGE_BYTES_MAX = 1 << 20
"""Larger tensors of more than two ranks use gloo's own sum, which does not send each byte to all ranks."""

_DISTRIBUTED: Any = torch.distributed
_FAILED = "failed"
_MEMORY = "memory"
_POLL_S = 0.001
_WATCH_S = 0.1


class PeerFailed(Exception):
    """Another rank of the group failed, for another reason than memory; this rank is not at fault."""


class _Interrupted(Exception):
    """A collective ended without a result."""


class Collectives(Protocol):
    """Communication between ranks on one kind of device.

    Attributes:
        exchanges: Whether small tensors are sent to every rank and summed by each, in the order of the ranks.
        wakes_peers: Whether waiting collectives of the others fail when a rank closes its connections.
    """

    exchanges: bool
    wakes_peers: bool

    def connect(self, store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
        """Return torch's process group of the ranks that meet in a store.

        Blocks: for the other ranks, at most `timeout_s`.
        """
        ...


class RankGroup:
    """The group of ranks that share one stage of one replica, from the view of one rank."""

    def __init__(
        self,
        settings: WorkerSettings,
        stage: str,
        collectives: Collectives,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.size = settings.ranks
        self.rank = settings.rank
        self._device = settings.device
        self._always_exchanges = settings.deterministic
        self._collectives = collectives
        self._path = f"{settings.rendezvous}-{stage}"
        self._timeout_s = timeout_s
        self._epoch = 0
        self._agreed = 0
        self._store: Any = None
        self._group: Any = None
        self._aborter: _PeerAborter | None = None
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert self.size == 1 or settings.rendezvous, "ranks need a path to find each other"

    # --- attempts ---

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body as an attempt of all ranks; either all succeed or all fail.

        Blocks: for the other ranks, at most `TIMEOUT_S` in each collective.

        Raises:
            DeviceOutOfMemory: When another rank ran out of memory.
            PeerFailed: When another rank failed for another reason.
            PeerLost: When another rank is gone or does not respond.
            RankDesync: When another rank is at another step.
        """
        if self.size == 1:
            yield
            return
        epoch = self._epoch
        try:
            self._connect_ranks()
            yield
            self._vote()
        except _Interrupted as error:
            raise self._verdict(str(error)) from error
        except BaseException as error:
            if isinstance(error, Exception) and self._aborter is not None and self._aborter.fired:
                # Another rank failed first, and this error results from computing with an aborted collective's data.
                raise self._verdict(str(error)) from error
            self._report_failure(epoch, error)
            raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body without other ranks; if it fails, the others fail in their next attempt."""
        epoch = self._epoch
        try:
            yield
        except BaseException as error:
            if self.size > 1:
                self._report_failure(epoch, error)
            raise

    def abort(self) -> None:
        """Fail the current attempt of the other ranks; no effect if they have to connect again already."""
        if self._group is not None:
            self._report_failure(self._epoch, DeviceOutOfMemory())

    def memory(self, memory: DeviceMemory) -> DeviceMemory:
        """Return the memory of this rank's device, whose `hold` succeeds only if it does on every rank."""
        return memory if self.size == 1 else _AgreedMemory(memory, self)

    # --- collectives, within `together` ---

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, bit-identical on each; the tensor may be overwritten."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        # The order of a library's sum depends on the number of rows.
        few = self.size == 2 or self._always_exchanges
        few = few or tensor.numel() * tensor.element_size() <= EXCHANGE_BYTES_MAX
        if self._collectives.exchanges and few:
            parts = self._exchange(tensor)
            return functools.reduce(torch.Tensor.add_, parts[2:], parts[0] + parts[1])
        self._wait(lambda: [self._group.allreduce([tensor])])
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenation of all ranks' last dimensions, in the order of the ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        if self._collectives.exchanges:
            parts = self._exchange(tensor)
        else:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            self._wait(lambda: [self._group.allgather([parts], [tensor])])
        whole = torch.cat(parts, dim=-1)
        assert whole.shape == (*tensor.shape[:-1], self.size * tensor.shape[-1])
        return whole

    def move(
        self, tensor: torch.Tensor, index: int, *, source: int, target: int
    ) -> torch.Tensor | None:
        """Return, on the target, the source's entry at `index` of a tensor of this shape. Collective call."""
        if self.rank == source:
            part = tensor[index].contiguous()
            self._wait(lambda: [self._group.send([part], target, 0)])
        if self.rank != target:
            return None
        found = torch.empty_like(tensor[0])
        self._wait(lambda: [self._group.recv([found], source, 0)])
        return found

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Send a tensor to every other rank; return the tensors of all, in the order of the ranks."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        parts = [
            torch.empty_like(tensor) if peer != self.rank else tensor for peer in range(self.size)
        ]
        self._wait(
            lambda: (
                [self._group.recv([parts[peer]], peer, 0) for peer in peers]
                + [self._group.send([tensor], peer, 0) for peer in peers]
            )
        )
        return parts

    def _wait(self, start: Callable[[], list[Any]]) -> None:
        """Start operations and wait for all of them.

        No reference to them may remain, not even in the traceback of an error: the connections of a group stay open as
        long as one of its operations is referenced.
        """
        works: list[Any] = []
        try:
            works += start()
            while works:
                works.pop().wait()
        except RuntimeError as error:
            raise _Interrupted(str(error)) from None
        finally:
            works.clear()

    # --- epochs ---

    def _connect_ranks(self) -> None:
        """Connect to the other ranks if not connected."""
        if self._group is not None:
            return
        store = self._open()
        store.set(f"step/{self.rank}", str(self._agreed))
        everybody = [f"step/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + self._timeout_s
        while True:
            # Check this first: a rank that finds the others at another step fails at once, but all ranks should report
            # that.
            failed = store.check([_FAILED])
            if store.check(everybody):
                break
            if failed or time.monotonic() > deadline:
                raise _Interrupted("timed out while connecting")
            time.sleep(_POLL_S)
        steps = [int(store.get(key)) for key in everybody]
        if any(step != self._agreed for step in steps):
            raise RankDesync(f"the ranks of a group meet after {steps} steps")
        try:
            self._group = self._collectives.connect(
                store, self.rank, self.size, timeout_s=self._timeout_s
            )
        except RuntimeError as error:
            raise _Interrupted(str(error)) from None
        if not self._collectives.wakes_peers:
            self._aborter = _PeerAborter(store, self._group)
        # A rank that continues must be connected to all: if it failed at once, others might wait for its connection.
        self._barrier()

    def _open(self) -> Any:
        if self._store is None:
            path = f"{self._path}-{self._epoch}"
            self._store = _DISTRIBUTED.FileStore(path, self.size)
        return self._store

    def _vote(self) -> None:
        """Agree that every rank has completed this attempt."""
        self._barrier()
        self._agreed += 1

    def _barrier(self) -> None:
        """Return when every rank has reached this point."""
        total = self.all_reduce(torch.ones(1, dtype=torch.int64, device=self._device))
        if int(total.item()) != self.size:
            # The result of an aborted collective on a GPU.
            raise _Interrupted("a collective was aborted")

    def _report_failure(self, epoch: int, error: BaseException) -> None:
        """Report a failure to the other ranks, once, and leave the group."""
        if self._epoch != epoch:
            return
        kind = (
            _MEMORY if isinstance(error, DeviceOutOfMemory | MemoryError) else type(error).__name__
        )
        self._open().set(_FAILED, f"{self.rank} {kind}")
        self._close_connections()

    def _verdict(self, words: str) -> Exception:
        """Leave a group after an interrupted collective; return the resulting exception."""
        store = self._open()
        reported = store.get(_FAILED).decode() if store.check([_FAILED]) else ""
        self._close_connections()
        if not reported:
            if "imed out" in words:
                return PeerLost.of_limit(
                    "another rank of the group does not answer (seconds)",
                    value=f"over {self._timeout_s:g}",
                    limit=f"{self._timeout_s:g}",
                    remedy="see the logs of the other ranks",
                )
            logger.warning("a collective was interrupted: %s", words)
            return PeerLost("the connection to another rank of the group is gone")
        rank, _, kind = reported.partition(" ")
        if kind == _MEMORY:
            return DeviceOutOfMemory(f"another rank of the group, {rank}, ran out of memory.")
        return PeerFailed(f"another rank of the group, {rank}, failed: {kind}")

    def _close_connections(self) -> None:
        """Close the connections, so that waiting peers fail at once; the next attempt connects again."""
        if self._aborter is not None:
            self._aborter.stop()
            self._aborter = None
            self._group.abort()
        self._group = None
        self._store = None
        self._epoch += 1


class _PeerAborter:
    """Aborts a group of GPUs after another rank's failure: closed connections do not wake peers there.

    Not yet run on several GPUs.

    Attributes:
        fired: Whether it did; set before the abort.
    """

    def __init__(self, store: Any, group: Any) -> None:
        self.fired = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch_store, args=(store, group), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()

    def _watch_store(self, store: Any, group: Any) -> None:
        while not self._done.wait(_WATCH_S):
            if store.check([_FAILED]):
                self.fired = True
                group.abort()
                return


class _AgreedMemory:
    """The memory of a device, with `hold` as an attempt of the whole group."""

    def __init__(self, memory: DeviceMemory, group: RankGroup) -> None:
        self._memory = memory
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Hold `size` bytes on every rank; a failure while they are held fails every rank, too."""
        with ExitStack() as held:
            with self._group.together():
                held.enter_context(self._memory.hold(size))
            with self._group.watched():
                yield
