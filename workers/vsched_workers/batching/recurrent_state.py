"""Recurrent layers: the states of recurrences and of short convolutions, per sequence.

Such a layer has a module that reads and writes its state in a cache of transformers (`get_conv_state` and the like).
Here that cache is created for each call, for its sequences alone, over tensors with a row for every slot. Decode rows
run in one call, with their states gathered unless they are consecutive; chunks run one after the other.

A chunk from position 0 begins without a state, whatever the slot contains. So slots need no reset for another request,
and a recomputed request starts from the beginning. A rank runs its steps in order and computes each token of a sequence
once; so older states are never needed, and only the last one is kept.

After the rows of the slots come snapshots, for the prefix cache: a chunk is split at the position of a snapshot, and a
snapshot is copied into the slot of a sequence that starts from it before the step. Captured steps have a spare row
after these, for their padding.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched.worker.contract import Batch
from vsched_workers.batching.kv_cache import Allocate
from vsched_workers.batching.paged_attention import (
    PagedStep,
    StatesOfStep,
    running_step,
)

ASKS_FOR_STATES = frozenset({"get_conv_state", "get_recurrent_state", "get_linear_cache"})
"""Cache methods; a module whose `forward` calls one has a state."""

BEGINS_ANEW = frozenset({"mamba_selective_scan"})
"""Functions over several tokens that take no initial state: after the first call, their modules run token by token.

A function that replaces one of them gets the state as `initial_state`.
"""

CACHES = ("cache_params", "past_key_values", "cache")
"""Parameter names of a module's cache."""

MASK = "attention_mask"

StateName = tuple[int, str, int]
"""The layer, `conv` or `recurrent`, and the index among several of a layer."""


class StateShape(NamedTuple):
    """Shape and type of one state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Send = Callable[[npt.NDArray[np.int64]], torch.Tensor]
"""Copies a small array to the device; see `DeviceInputs`."""


class _StatefulModule(NamedTuple):
    """A module's layer, the parameter name of its cache, and the functions that it calls of `BEGINS_ANEW`."""

    layer: int
    cache: str
    begins_anew: frozenset[str]


class SequenceStates:
    """The states of some sequences in one call of one module, behind the interface of a transformers cache.

    `held` has a tensor [sequences, ...] for each state; it is empty at the beginning of sequences. Afterwards it has
    the new states: new tensors, or the same ones, overwritten.
    """

    def __init__(self, held: Mapping[StateName, torch.Tensor] | None = None) -> None:
        self.held: dict[StateName, torch.Tensor] = dict(held or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, [sequences, channels, kernel]; None at the beginning."""
        return self.held.get((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrence; None at the beginning."""
        return self.held.get((layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """Append inputs of a convolution, [sequences, channels, tokens]; return the previous ones and these."""
        name = (layer_idx, "conv", state_idx)
        before = self.held.get(name)
        size = conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            # Values of a token stay next to each other, as in the result of a product.
            rows = [each.transpose(1, 2) for each in (before, conv_states)]
            whole = torch.cat(rows, dim=1).transpose(1, 2)
        else:
            missing = size - conv_states.shape[-1]
            whole = nn.functional.pad(conv_states, (missing, 0)) if missing > 0 else conv_states
        self.held[name] = whole[..., -size:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        """Store the state of a recurrence."""
        self.held[layer_idx, "recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a recurrence; alias in transformers."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Store the state of a recurrence; alias in transformers."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: only the last state is kept."""
        del layer_idx
        return False


class RecurrentStates:
    """The states of all slots and recurrent layers.

    Attributes:
        shapes: Shapes of one sequence's states, known after a run of the model within `noting`.
        found: The recurrent modules, and the `forward` of each.
        names: Names in the code of their `forward`.
        spare: The spare row, if there is one.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the recurrent modules, and replace their `forward` by one that runs sequence by sequence."""
        self.shapes: dict[StateName, StateShape] = {}
        self.found: dict[nn.Module, Callable[..., Any]] = {}
        self.names: set[str] = set()
        self.spare = 0
        self._noting = False
        self._slots: dict[StateName, torch.Tensor] = {}
        self._first_snapshot = 0
        self._functions: Mapping[str, Callable[..., Any]] = {}
        self._initial_state: torch.Tensor | None = None
        for module in model.modules():
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            names = frozenset(code.co_names) if code is not None else frozenset()
            parameters = inspect.signature(type(module).forward).parameters
            cache = next((each for each in CACHES if each in parameters), None)
            if names & ASKS_FOR_STATES and cache is not None:
                untyped: Any = module
                own = _StatefulModule(untyped.layer_idx, cache, names & BEGINS_ANEW)
                self.found[module] = untyped.forward
                self.names |= names
                untyped.forward = functools.partial(self._run_module, module, own)

    def use_functions(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Replace, by name, functions that the code of the modules calls."""
        self._functions = functions
        begun = {name: self._continuing(functions[name]) for name in BEGINS_ANEW & {*functions}}
        for module in self.found:
            code = inspect.unwrap(type(module).forward)
            if functions.keys() & {*code.__code__.co_names}:
                names = {**code.__globals__, **functions, **begun}
                own = types.FunctionType(code.__code__, names, closure=code.__closure__)
                own.__defaults__, own.__kwdefaults__ = code.__defaults__, code.__kwdefaults__
                self.found[module] = types.MethodType(own, module)

    def _continuing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: function(
            *args, **options, initial_state=self._initial_state
        )

    @property
    def modules(self) -> int:
        """Number of recurrent modules."""
        return len(self.found)

    @property
    def size_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(each.size_bytes for each in self.shapes.values())

    @property
    def layers(self) -> set[int]:
        """Numbers of the recurrent layers."""
        return {layer for layer, _, _ in self.shapes}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Let the model run outside of a step, and record the shapes of its states."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def build(self, slots: int, snapshots: int, allocate: Allocate, *, spare: int = 0) -> None:
        """Allocate the states of `slots` slots, followed by `snapshots` snapshots and `spare` spare rows."""
        self._first_snapshot, self.spare = slots, slots + snapshots
        rows = slots + snapshots + spare
        for name, each in self.shapes.items():
            self._slots[name] = allocate((rows, *each.shape), dtype=each.dtype)

    def clear_spare(self) -> None:
        """Set the state of the spare row to zeros."""
        for tensor in self._slots.values():
            tensor[self.spare] = 0

    def begin_step(self, step: PagedStep, batch: Batch, send: Send) -> None:
        """Restore snapshots to slots, and set the slots of a step's states."""
        slots = [*batch.decode_slots, *(chunk.slot for chunk in batch.chunks)]
        places = [place for chunk in batch.chunks for _, place in chunk.writes]
        rows = send(np.array(slots, dtype=np.int64))
        snapshots = iter(send(np.array(places, dtype=np.int64) + self._first_snapshot).split(1))
        chunks = []
        for segment, chunk in zip(step.segments, batch.chunks, strict=True):
            ends = [segment.start + end - segment.first for end, _ in chunk.writes]
            chunks.append([(end, next(snapshots)) for end in ends])
        step.states = StatesOfStep(rows, chunks)
        if batch.restored:
            taken, read = np.array(batch.restored, dtype=np.int64).T.copy()
            into, source = send(taken), send(read + self._first_snapshot)
            for tensor in self._slots.values():
                tensor.index_copy_(0, into, tensor.index_select(0, source))

    def free_states(self) -> None:
        """Free the states."""
        self._slots.clear()

    def _run_module(
        self,
        module: nn.Module,
        own: _StatefulModule,
        hidden_states: torch.Tensor,
        *_: object,
        **options: Any,
    ) -> Any:
        """Run a module over a packed batch, [1, rows, hidden], in place of its own `forward`."""

        def call(part: slice, states: SequenceStates, *, apart: bool = False) -> Any:
            """Run some rows: consecutive rows of one sequence, or one row of each of several (`apart`)."""
            cut = functools.partial(_cut, part=part, apart=apart)
            given = {name: cut(option) for name, option in options.items()}
            if own.begins_anew:
                self._initial_state = states.get_recurrent_state(own.layer)
            return self.found[module](cut(hidden_states), **given | {own.cache: states, MASK: None})

        if self._noting:
            states = SequenceStates()
            found = call(slice(None), states)
            for name, tensor in states.held.items():
                self.shapes[name] = StateShape(tuple(tensor.shape[1:]), tensor.dtype)
            return found
        stepwise = bool(own.begins_anew - self._functions.keys())
        step = running_step()
        rows_of = step.states
        assert rows_of is not None, "a step of such a model has them"
        parts: list[Any] = []
        if step.decode_rows:
            slots = rows_of.slots[: step.decode_rows]
            states = self._of(own.layer, slots)
            found = call(slice(0, step.decode_rows), states, apart=True)
            self._keep(own.layer, slots, states)
            parts.append(_first(found).transpose(0, 1))
        for index, segment in enumerate(step.segments):
            at = step.decode_rows + index
            slots = rows_of.slots[at : at + 1]
            is_first = segment.first == 0
            states = SequenceStates() if is_first else self._of(own.layer, slots)
            row = segment.start
            for end, kept in [*rows_of.chunks[index], (segment.stop, slots)]:
                while row < end:
                    tokens = 1 if stepwise and states.held else end - row
                    found = call(slice(row, row + tokens), states)
                    parts.append(_first(found))
                    row += tokens
                self._keep(own.layer, kept, states)
        rows = torch.cat(parts, dim=1)
        return (rows, *found[1:]) if isinstance(found, tuple) else rows

    def _of(self, layer: int, slots: torch.Tensor) -> SequenceStates:
        """Return the states of some slots: views for consecutive slots on a host, copies otherwise.

        Copies also for all slots, so that a profiling run includes their memory.
        """
        own = (name for name in self._slots if name[0] == layer)
        has_all = len(slots) == self._first_snapshot > 2  # of two slots, any are consecutive
        if has_all or not slots.is_cpu or (np.diff(slots.numpy()) != 1).any():
            return SequenceStates({name: self._slots[name].index_select(0, slots) for name in own})
        rows = slice(int(slots[0]), int(slots[-1]) + 1)
        return SequenceStates({name: self._slots[name][rows] for name in own})

    def _keep(self, layer: int, slots: torch.Tensor, states: SequenceStates) -> None:
        for name, tensor in self._slots.items():
            if name[0] != layer:
                continue
            kept = states.held[name]
            if kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                if kept.data_ptr() == tensor[int(slots[0])].data_ptr():
                    continue
                kept = kept.clone()
            tensor.index_copy_(0, slots, kept.to(tensor.dtype))


def _first(found: Any) -> torch.Tensor:
    rows: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return rows


def _cut(option: Any, part: slice, *, apart: bool) -> Any:
    """Return the rows of `part` of tensors with one row per token; anything else is unchanged."""
    if isinstance(option, tuple):
        return tuple(_cut(each, part, apart=apart) for each in option)
    if not isinstance(option, torch.Tensor) or option.dim() < 2:
        return option
    return option[:, part].transpose(0, 1) if apart else option[:, part]
