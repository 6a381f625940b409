"""What layers keep of a sequence besides keys and values: the states of recurrences and of short convolutions.

Such a layer has a module that asks a cache of transformers for its state (`get_conv_state` and the like). Here that
cache is made for each call: of the sequences in question alone, over tensors that have a row for every slot. Decoding
sequences run in one call, with their states gathered; chunks run one after the other.

A chunk from position 0 begins without a state, whatever the slot held before. So nothing has to be reset when a slot
is given to another request, and what is computed again begins anew. A rank carries its steps out in order, and
computes each token of a sequence once; so there is no older state to go back to, and states are kept once.

Behind the rows of the slots lie snapshots, for the prefix cache: a chunk is cut where one is to be taken, and a slot
that begins with one has it copied before the step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

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
"""Methods of caches: a module whose `forward` calls one has a state."""

BEGINS_ANEW = frozenset({"mamba_selective_scan"})
"""Functions over several tokens that take no state to begin from: modules that call one go on token by token."""

CACHES = ("cache_params", "past_key_values")
"""What a module's cache is called."""

MASK = "attention_mask"

StateName = tuple[int, str, int]
"""The layer, `conv` or `recurrent`, and the number among several of a layer."""


class StateShape(NamedTuple):
    """What one state of one sequence is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Send(Protocol):
    """Brings a small array to the device; see `DeviceInputs`."""

    def __call__(self, array: npt.NDArray[np.int64], /) -> torch.Tensor:
        """Return it as a tensor."""
        ...


class _StatefulModule(NamedTuple):
    """Its layer, what its cache is called, and whether it goes on from a state by single tokens only."""

    layer: int
    cache: str
    stepwise: bool


class SequenceStates:
    """The states of some sequences in one call of one module, which takes it for a cache of transformers.

    `held` has a tensor [sequences, ...] for each state; without any the sequences are at their beginning. What the
    module leaves behind is in `held` afterwards: new tensors, or the same ones, written to.
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
        """Take new inputs of a convolution, [sequences, channels, tokens]; return them after the last ones."""
        name = (layer_idx, "conv", state_idx)
        before = self.held.get(name)
        size = conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            whole = torch.cat([before, conv_states], dim=-1)
        else:
            whole = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        self.held[name] = whole[..., -size:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        """Take the new state of a recurrence."""
        self.held[layer_idx, "recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a recurrence, by another name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Take the new state of a recurrence, by another name."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return that nothing but the last state is kept."""
        del layer_idx
        return False


class RecurrentStates:
    """The states of all slots, of all layers that have one.

    Attributes:
        shapes: The states of one sequence, known once a sequence has run through the model in `noting`.
        found: The modules that have a state.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules that have a state, and have them run sequence by sequence from now on."""
        self.shapes: dict[StateName, StateShape] = {}
        self.found: set[nn.Module] = set()
        self._noting = False
        self._slots: dict[StateName, torch.Tensor] = {}
        self._first_snapshot = 0
        for module in model.modules():
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            names = frozenset(code.co_names) if code is not None else frozenset()
            parameters = inspect.signature(type(module).forward).parameters
            cache = next((each for each in CACHES if each in parameters), None)
            if names & ASKS_FOR_STATES and cache is not None:
                untyped: Any = module
                own = _StatefulModule(untyped.layer_idx, cache, bool(names & BEGINS_ANEW))
                untyped.forward = functools.partial(self._run, untyped.forward, own)
                self.found.add(module)

    @property
    def modules(self) -> int:
        """How many modules have a state."""
        return len(self.found)

    @property
    def size_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(each.size_bytes for each in self.shapes.values())

    @property
    def layers(self) -> set[int]:
        """The layers that have a state."""
        return {layer for layer, _, _ in self.shapes}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Let the model run outside of a step, and learn what its modules keep of a sequence."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def build(self, slots: int, snapshots: int, allocate: Allocate) -> None:
        """Allocate the states of so many slots, and so many snapshots of states behind them."""
        self._first_snapshot = slots
        for name, each in self.shapes.items():
            self._slots[name] = allocate((slots + snapshots, *each.shape), dtype=each.dtype)

    def begin(self, step: PagedStep, batch: Batch, send: Send) -> None:
        """Let slots begin with snapshots, and tell a step whose states it reads and writes."""
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

    def drop(self) -> None:
        """Forget them."""
        self._slots.clear()

    def _run(
        self,
        forward: Callable[..., Any],
        own: _StatefulModule,
        hidden_states: torch.Tensor,
        *_: object,
        **options: Any,
    ) -> Any:
        """Run a module over a packed row, [1, rows, hidden], in place of its own `forward`."""

        def call(part: slice, states: SequenceStates, *, apart: bool = False) -> Any:
            """Run some rows: one after the other of one sequence, or one each of several."""
            cut = functools.partial(_cut, part=part, apart=apart)
            given = {name: cut(option) for name, option in options.items()}
            return forward(cut(hidden_states), **given | {own.cache: states, MASK: None})

        if self._noting:
            states = SequenceStates()
            found = call(slice(None), states)
            for name, tensor in states.held.items():
                self.shapes[name] = StateShape(tuple(tensor.shape[1:]), tensor.dtype)
            return found
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
            anew = segment.first == 0
            states = SequenceStates() if anew else self._of(own.layer, slots)
            row = segment.start
            for end, kept in [*rows_of.chunks[index], (segment.stop, slots)]:
                while row < end:
                    tokens = 1 if own.stepwise and states.held else end - row
                    found = call(slice(row, row + tokens), states)
                    parts.append(_first(found))
                    row += tokens
                self._keep(own.layer, kept, states)
        rows = torch.cat(parts, dim=1)
        return (rows, *found[1:]) if isinstance(found, tuple) else rows

    def _of(self, layer: int, slots: torch.Tensor) -> SequenceStates:
        own = (name for name in self._slots if name[0] == layer)
        return SequenceStates({name: self._slots[name].index_select(0, slots) for name in own})

    def _keep(self, layer: int, slots: torch.Tensor, states: SequenceStates) -> None:
        for name, tensor in self._slots.items():
            if name[0] == layer:
                tensor.index_copy_(0, slots, states.held[name].to(tensor.dtype))


def _first(found: Any) -> torch.Tensor:
    rows: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return rows


def _cut(option: Any, part: slice, *, apart: bool) -> Any:
    """Return the rows of `part` of what has a row for each token; anything else as it is."""
    if isinstance(option, tuple):
        return tuple(_cut(each, part, apart=apart) for each in option)
    if not isinstance(option, torch.Tensor) or option.dim() < 2:
        return option
    return option[:, part].transpose(0, 1) if apart else option[:, part]
