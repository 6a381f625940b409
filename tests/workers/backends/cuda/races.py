"""Fakes of `torch.cuda`'s streams, events and graphs, and a detector of races between them.

Everything runs at once, on the host. But each access to memory is recorded with its actor, the host or a stream, and
with the actor's knowledge of the others (a vector clock): a stream knows the host's actions before an operation was
enqueued, and everything before an event that it waits for; the host knows everything that it has waited for. Two
accesses to the same bytes, one of which writes, must be ordered by these clocks, or a delayed device may execute them
in the other order.

An operation belongs to a stream if any of its memory is the device's: memory that is created with a device argument,
results of such operations, and tensors passed to `Machine.own`. All other memory is the host's. `Tensor.numpy` counts
as a write by the host, as uses of the array are not recorded. Freed memory is not checked: torch handles that.

The clocks are those of Lamport and Mattern; FastTrack (Flanagan and Freund, 2009) finds races by them.

A fake graph stream that runs work late, when something waits for it, as a GPU may.

Kernels that are wrong or do not run, in place of one of a module's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.base import RunModel
from vsched_workers.backends.cuda import attention_trials
from vsched_workers.backends.cuda.graphs import Act, CudaGraphStream, DecodeGraphs, Run
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep
from vsched_workers.batching.recurrent_state import RecurrentStates

HOST = "the host"

Known = dict[str, int]
"""A vector clock: the progress of each actor as known to one of them."""


class RaceError(AssertionError):
    """Two unordered accesses to the same memory."""


class _Access(NamedTuple):
    first: int
    stop: int
    writes: bool
    who: str
    when: int
    what: str


class Stream:
    """A stream; waiting for it, or having it wait, transfers its clock."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def wait_event(self, event: Event) -> None:
        self.machine.learn(self.name, event.known)

    def wait_stream(self, other: Stream) -> None:
        self.machine.learn(self.name, self.machine.known_to(other.name))

    def synchronize(self) -> None:
        self.machine.learn(HOST, self.machine.known_to(self.name))


class Event:
    """The clock of a stream when the event was recorded."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.known: Known = {}

    def record(self, stream: Stream) -> None:
        self.known = dict(self._machine.reported(stream.name))

    def synchronize(self) -> None:
        self._machine.learn(HOST, self.known)


class Graph:
    """Recorded operations that are replayed on the same memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.recorded: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, made in self.recorded:
            self._machine.again(func, args, kwargs, made)

    def reset(self) -> None:
        self.recorded.clear()


class Machine(TorchDispatchMode):
    """Records the memory accesses of operations, by the host or the current stream.

    Attributes:
        current: The stream that operations run on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[str, Known] = {HOST: {}}
        self._accesses: dict[int, list[_Access]] = {}
        self._device: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._recording: list[tuple[Any, Any, Any, Any]] | None = None
        self._streams = 0
        self.pinned: dict[int, int] = {}
        """Sizes of registered host memory, by address."""
        self.current = self.stream()

    # --- replacements for torch.cuda ---

    def stream(self, *_: object, **__: object) -> Stream:
        self._streams += 1
        name = f"stream {self._streams}"
        self._known[name] = {}
        return Stream(self, name)

    def event(self, *_: object, **__: object) -> Event:
        return Event(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def record(self, graph: Graph, *, stream: Stream, **_: object) -> Iterator[None]:
        self._recording = graph.recorded
        try:
            with self.on(stream):
                yield
        finally:
            self._recording = None

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Replace parts of `torch.cuda`, and record accesses to memory outside of torch."""
        for name, value in {
            "Stream": self.stream,
            "Event": self.event,
            "stream": self.on,
            "current_stream": lambda *_: self.current,
            "graph_pool_handle": lambda: 0,
            "CUDAGraph": lambda: Graph(self),
            "graph": self.record,
            "set_sync_debug_mode": lambda _: None,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=lambda address, size, _: self.pinned.update({address: size}),
                cudaHostUnregister=self.pinned.pop,
            ),
            "check_error": lambda _: None,
        }.items():
            patch.setattr(torch.cuda, name, value)
        numpy = torch.Tensor.numpy

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note(HOST, tensor, writes=True, what="numpy")
            return numpy(tensor, *args, **kwargs)

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if _place(tensor) not in self._device:
                return tensor
            self.note(self.current.name, tensor, writes=False, what="cpu")
            self.learn(HOST, self.known_to(self.current.name))
            with _disable_current_modes():
                return tensor.clone()

        patch.setattr(torch.Tensor, "numpy", noted)
        patch.setattr(torch.Tensor, "cpu", to_host)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make memory belong to the device."""
        for tensor in tensors:
            self._keep(tensor)
            self._device.add(_place(tensor))

    def unseen(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs without being recorded: host-only work with torch."""

        def ran(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return run(*args, **kwargs)

        return ran

    # --- clocks ---

    def known_to(self, who: str) -> Known:
        return self._known[who]

    def learn(self, who: str, known: Known) -> None:
        mine = self._known[who]
        for other, when in known.items():
            mine[other] = max(mine.get(other, 0), when)

    def reported(self, who: str) -> Known:
        """Return the clock of a stream after the host has enqueued work on it."""
        self.learn(who, self._known[HOST])
        return self._known[who]

    # --- accesses ---

    def note(self, who: str, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        """Record an access.

        Raises:
            RaceError: When it is not ordered after an earlier one.
        """
        if not tensor.numel():
            return
        self._keep(tensor)
        known = self._known[who]
        known[who] = known.get(who, 0) + 1
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        stop = first + (int(reach) + 1) * tensor.itemsize
        mine = _Access(first, stop, writes, who, known[who], what)
        earlier = self._accesses.setdefault(_place(tensor), [])
        for each in earlier:
            apart = each.stop <= first or stop <= each.first
            if apart or not (writes or each.writes) or each.when <= known.get(each.who, 0):
                continue
            raise RaceError(
                f"{what} of {who} and {each.what} of {each.who}: the same memory, in no order"
            )
        # A later actor that knows this access knows the earlier ones, or of a read those of the same actor.
        earlier[:] = [
            each
            for each in earlier
            if each.first < first
            or stop < each.stop
            or not (writes or (each.who == who and not each.writes))
        ]
        earlier.append(mine)

    def _keep(self, tensor: torch.Tensor) -> None:
        if _place(tensor) not in self._accesses:
            self._accesses[_place(tensor)] = []
            self._kept.append(tensor)  # or its address would be reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        pinned = options.pop("pin_memory", False)
        made = self._run(func, args, options, pinned=bool(pinned))
        if self._recording is not None:
            self._recording.append((func, args, options, made))
        return made

    def again(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Replay an operation of a graph: its results go to their previous memory."""
        found = self._run(func, args, kwargs)
        with _disable_current_modes():
            for old, new in zip(tree_leaves(made), tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor) and _place(old) != _place(new):
                    old.copy_(new)
        self._note_made(self.current.name, func, args, kwargs, made)

    def _run(self, func: Any, args: Any, kwargs: Any, *, pinned: bool = False) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = any(_place(each) in self._device for each in given)
        makes = not given and not pinned and kwargs.get("device") is not None
        who = self.current.name if on_device or makes else HOST
        if who != HOST:
            self.reported(who)
        found = func(*args, **kwargs)
        places = {_place(each) for each in given}
        made = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        writes = any(
            each.alias_info and each.alias_info.is_write for each in func._schema.arguments
        )
        # Results that share memory with inputs, without a write, are views.
        fresh = [each for each in made if _place(each) not in places]
        if self._recording is not None:  # on a GPU nothing is executed yet
            self.own(fresh)
        elif writes or fresh:
            self._note_given(who, func, args, kwargs)
            self._note_made(who, func, args, kwargs, found)
        if who != HOST and self._waits(func, args, kwargs, given):
            self.learn(HOST, self._known[who])
        return found

    def _note_given(self, who: str, func: Any, args: Any, kwargs: Any) -> None:
        names = func._schema.arguments
        for at, each in enumerate(names):
            value = args[at] if at < len(args) else kwargs.get(each.name)
            writes = each.alias_info is not None and each.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self.note(who, tensor, writes=writes, what=str(func))

    def _note_made(self, who: str, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        given = {
            _place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in given:
                if who != HOST:
                    self._device.add(_place(tensor))
                self.note(who, tensor, writes=True, what=str(func))

    def _waits(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        """Return whether the host waits for an operation that returns a value or is a blocking host copy."""
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return True
        if name not in {"aten::copy_", "aten::_to_copy"}:
            return False
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return not non_blocking and any(_place(each) not in self._device for each in given)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class LateStream(CudaGraphStream):
    """Runs work in order, but only on a wait for it or for later work.

    So code that overwrites a copy's source too early, or reads its target too early, fails here.

    Attributes:
        starts: Number of captured steps that were started.
        uploads: Number of copies to the device.
        failure: Raised in place of a capture.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.uploads = 0
        self.failure: Exception | None = None
        self.forgotten = 0
        self._on_host: set[int] = set()
        self._late: list[Act] = []
        self._done = 0

    def host(self, *shape: int) -> torch.Tensor:
        made = torch.zeros(shape, dtype=torch.int32)
        self._on_host.add(_place(made))
        return made

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        self.uploads += _place(source) in self._on_host
        return self._later(lambda: target.copy_(source))

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        result = run()
        run()

        def replay() -> None:
            result.copy_(run())

        return replay, result

    def start(self, replay: Act) -> None:
        self.starts += 1
        self._later(replay)

    def wait_for_others(self) -> None:
        """Others run at once."""

    def let_others_wait(self) -> None:
        self._run_until(len(self._late))

    def forget(self) -> None:
        self._run_until(len(self._late))
        self.forgotten += 1

    def _later(self, act: Callable[[], object]) -> Act:
        self._late.append(lambda: (act(), None)[1])
        place = len(self._late)
        return lambda: self._run_until(place)

    def _run_until(self, place: int) -> None:
        while self._done < place:
            self._late[self._done]()
            self._done += 1


class TensorDecode:
    """Decode attention with operations that can be captured, on the device alone; on a CPU, all memory is that."""

    capturable = True

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        if step.on_device is None:
            step.on_device = (torch.from_numpy(step.tables), torch.from_numpy(step.contexts))
        tables, contexts = step.on_device
        size = step.cache.block_size
        device = query.device
        slots = (tables.long()[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        groups = query.shape[1] // step.cache.keys[layer].shape[1]
        keys, values = (
            each[layer][slots].repeat_interleave(groups, 2)
            for each in (step.cache.keys, step.cache.values)
        )
        scores = torch.einsum("rhd,rthd->rht", query, keys) * scaling
        unseen = torch.arange(slots.shape[1], device=device)[None] >= contexts[:, None]
        weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("rht,rthd->rhd", weights, values)


class CapturingBackend(Backend):
    """A host whose decode steps are captured, as on a GPU."""

    spare_blocks = 1

    def __init__(self, settings: WorkerSettings, dtype: torch.dtype) -> None:
        super().__init__(settings, dtype)
        self.stream = LateStream()

    def graph_stream(self) -> CudaGraphStream:
        return self.stream

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        return super().choose_attention(cache, heads)._replace(decode=TensorDecode())

    def capture_steps(
        self,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        states: RecurrentStates | None,
    ) -> DecodeGraphs:
        reserved = self.memory.reserved
        return DecodeGraphs(
            self.graph_stream(), cache, attention, run, reserved=reserved, states=states
        )


class Idle:
    """A kernel that writes zeros to all of its tensors."""

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return lambda *arguments, **_: [
            each.zero_() for each in arguments if isinstance(each, torch.Tensor)
        ]


def check_not_used(
    usable: Callable[[], Any],
    kind: Any,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that `usable` returns no kernels of a kind, and logs why, if one is wrong or fails."""
    right = attention_trials.load_kernels(kind)
    assert right is not None
    assert usable() is not None
    for one, why in ((Idle(), "which is slower: results are wrong by"), (None, "which is slower")):
        given = right._replace(**{broken: one})
        monkeypatch.setattr(attention_trials, "load_kernels", lambda _, given=given: given)
        assert usable() is None
        assert why in caplog.text
        caplog.clear()
