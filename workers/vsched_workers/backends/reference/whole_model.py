"""The generic path: a model of any architecture over paged attention, with transformers' own modules and head.

Such a model need only use transformers' attention interface. A first run of two tokens, without attention, determines
what each layer keeps of a token, and rejects models that keep anything else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched.types import ModelInfo
from vsched_workers.backends.base import RunnableLanguage
from vsched_workers.batching.kv_cache import KvShape
from vsched_workers.batching.packed_step import Images
from vsched_workers.batching.paged_attention import NAME, PagedStep, running
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.families.generic import (
    NEITHER,
    NO_ATTENTION,
    OWN_ATTENTION,
    layer_kinds,
    refusal,
    shorter_window,
)
from vsched_workers.families.sharing import unshared

if TYPE_CHECKING:
    from vsched_workers.backends.reference.image_inputs import ImageInputs

FIRST_RUN = "vsched_first_run"
NOTHING_KEPT = KvShape(0, 0, 0)
UNRUNNABLE = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
"""Exceptions that modules raise if they cannot run in the requested way."""


class WholeModel:
    """Transformers' model, run over a packed batch; like `LanguageLayers`, but it returns logits."""

    def __init__(
        self,
        model: Any,
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
        inputs: ImageInputs | None = None,
    ) -> None:
        """Take the model; `send` copies row numbers to its device, and `inputs` is for models that take images."""
        self._model = model
        self._send = send
        self._inputs = inputs
        self._said: Any = None
        # Some models call the decoder inside their base model, which is then not called itself.
        self._base: Any = getattr(model.base_model, "decoder", model.base_model)
        self._keeps = (
            self._base is not model
            and "logits_to_keep" in inspect.signature(model.forward).parameters
        )

    def runnable(self, weights_bytes: int) -> RunnableLanguage:
        """Return it as a backend runs it; layers and head are separate unless it computes the logits of all rows."""
        apart = (self._hidden_states, self._logits_of) if self._keeps else None
        return RunnableLanguage(self, lambda logits: logits, weights_bytes, apart)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the logits of the wanted rows, [wanted, vocabulary]."""
        logits = self._logits_of_rows(token_ids, positions, step, images, wanted)
        # A captured step wants all rows, and cannot copy row numbers to the device.
        return logits if len(logits) == len(wanted) else logits[self._send(wanted)]

    def _logits_of_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        kept: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the logits of the kept rows, or of all rows if the model cannot select rows."""
        given: dict[str, Any]
        if self._inputs is not None:
            given = self._inputs.arguments(token_ids, positions, images, step)
        else:
            assert images is None, "it is a model of text alone"
            given = {"input_ids": token_ids[None], "position_ids": positions[0]}
        if self._keeps and len(kept) < len(token_ids):
            given["logits_to_keep"] = self._send(kept)
        with running(step):
            logits: torch.Tensor = self._model(use_cache=False, **given).logits[0]
        return logits

    def _hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the input of the model's head, [wanted, hidden]."""
        found: list[Any] = []
        hook = self._base.register_forward_hook(lambda *seen: found.append(seen[-1]))
        try:
            self._logits_of_rows(token_ids, positions, step, images, wanted[:1])
        finally:
            hook.remove()
        hidden: torch.Tensor = found[0].last_hidden_state[0]
        self._said = dataclasses.replace(found[0], last_hidden_state=hidden.new_empty(0))
        return hidden[self._send(wanted)]

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as the model computes them, including scaling or capping: only the head runs."""
        said = dataclasses.replace(self._said, last_hidden_state=hidden[None])
        self._base.forward = lambda *_, **__: said
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._base.forward
        return logits


class DecoderLayers:
    """The layers of a model, some of which can be skipped temporarily.

    Layers may be of several kinds (dense or mixture of experts, with or without sliding window), with different memory
    needs.
    """

    def __init__(self, layers: nn.ModuleList, stated: Sequence[str]) -> None:
        """Take the layers in order, and their kinds if the configuration lists them."""
        self._layers: list[Any] = list(layers)
        names: Sequence[str] = stated or [""] * len(layers)
        self._kinds = [
            (name, *layer_kind(layer)) for name, layer in zip(names, layers, strict=True)
        ]
        self._more: list[int | None] = [None] * len(layers)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the return type of layers, a tensor or a tuple that begins with it, while the context is open."""

        def note(index: int, *seen: object) -> None:
            found = seen[-1]
            self._more[index] = len(found) - 1 if isinstance(found, tuple) else None

        hooks = [
            layer.register_forward_hook(functools.partial(note, index))
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def first(self, count: int) -> Iterator[None]:
        """Run only the first `count` layers of each kind until the context ends."""
        seen: dict[Hashable, int] = {}
        left_out = []
        for index, kind in enumerate(self._kinds):
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > count:
                left_out.append(index)
        for index in left_out:
            self._layers[index].forward = functools.partial(pass_rows, self._more[index])
        try:
            yield
        finally:
            for index in left_out:
                del self._layers[index].forward


def pass_rows(more: int | None, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
    """Stand in for a layer that returns hidden states alone, or a tuple with `more` further values."""
    return hidden_states if more is None else (hidden_states, *[None] * more)


def layer_kind(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return a key that is equal for two layers of one kind: modules, and the shapes of their weights."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple(weight.shape for weight in layer.parameters())


class FirstRun(NamedTuple):
    """Findings of the first run.

    Attributes:
        kv: Shape of each layer's keys and values per token; zero heads if it keeps none.
        states: Recurrent states of the layers.
        layers: The layers, if some can be skipped.
        plain: Whether all layers that keep anything attend plainly: without windows, soft-capping or sinks, and with
            keys as wide as values.
        only_places_rows: Whether a model that takes images only puts their rows in place of placeholders.
        adaptable: Names of linear layers that are called once per step with all its rows, and so can have LoRA
            adapters.
    """

    kv: list[KvShape]
    states: RecurrentStates
    layers: DecoderLayers | None
    plain: bool = False
    only_places_rows: bool = False
    adaptable: frozenset[str] = frozenset()


@torch.inference_mode()
def first_run(model: Any, info: ModelInfo, inputs: ImageInputs | None = None) -> FirstRun:
    """Run two tokens through a model without attention, and prepare it for steps.

    `inputs` also passes embedding rows of images.

    Raises:
        CheckpointError: When a layer does not attend to earlier tokens through the interface exactly once, or keeps
            other data that is not supported.
    """
    from transformers import AttentionInterface

    shapes: dict[int, KvShape] = {}
    strange: list[str] = []
    ruled: set[int] = set()
    family = info.family
    text = model.config.get_text_config()
    kinds = layer_kinds(text)
    mask_window = None if kinds else shorter_window(text)
    looks_ahead = info.item_atomic or info.prompt_atomic

    def note(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)
        if sliding_window is None and kinds and kinds[layer] == "sliding_attention":
            strange.append("windows that are not passed to the attention")
        sliding_window = module.mask_window = sliding_window or mask_window
        if layer in shapes:
            strange.append("layers that attend more than once")
        if attention_mask is not None:
            strange.append("masks of its own")
        if not (looks_ahead or getattr(module, "is_causal", True)):
            strange.append("layers that attend to later tokens")
        rules = (sliding_window, softcap, s_aux)
        if key.shape[3] != value.shape[3] or any(rule is not None for rule in rules):
            ruled.add(layer)
        shapes[layer] = KvShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(FIRST_RUN, note)
    count = text.num_hidden_layers
    layers = _decoder_layers(model, count)
    states = RecurrentStates(model)
    if model._is_stateful and not states.modules:  # noqa: SLF001 # transformers' own check
        raise refusal(family, "an unknown kind of recurrent state")
    model.set_attn_implementation(FIRST_RUN)
    try:
        with states.noting(), layers.noting() if layers is not None else nullcontext():
            with _noting_rows(model) as rows_seen:
                _run_two_tokens(model)
            if not shapes:
                strange.append(OWN_ATTENTION if not states.modules else NO_ATTENTION)
            idle = {layer for layer, kind in enumerate(kinds) if kind in NEITHER}
            if {*shapes, *states.layers, *idle} != set(range(count)):
                strange.append(
                    f"{count} layers, of which {len(shapes)} attend through the interface"
                )
            if strange:
                raise refusal(family, strange[0])
            places = False
            if inputs is not None:
                inputs.try_out(model)
                places = inputs.only_places_rows(model)
            runs_without = layers is not None and _runs_without(model, layers)
        found = [shapes.get(layer, NOTHING_KEPT) for layer in range(count)]
        adaptable = _adaptable(model, rows_seen, states)
        skippable = layers if runs_without else None
        return FirstRun(found, states, skippable, not ruled, places, adaptable)
    finally:
        model.set_attn_implementation(NAME)


def check_kept(found: FirstRun, info: ModelInfo) -> None:
    """Check that layers keep as many bytes as the engine was given, which it divided the memory by.

    Raises:
        CheckpointError: When they do not.
    """
    kept = torch.int8 if info.kv_dtype == "int8" else getattr(torch, info.dtype)
    per_token = sum(each.kept_bytes(kept) for each in found.kv)
    for written, reported, what in (
        (per_token, info.kv_bytes_per_token, "token"),
        (found.states.size_bytes, info.state_bytes, "sequence"),
    ):
        if written != reported:
            raise refusal(
                info.family,
                f"layers that keep {written} bytes of a {what}, although config.json states {reported}",
            )


def check_built(model: Any, info: ModelInfo, share: Callable[[Any], None] | None = None) -> None:
    """Do the first run with a model without weights, on the meta device, if that is possible.

    `share` reduces a model to one rank's share. If given, the first run is repeated with the share, and `info`
    describes the share.

    Raises:
        CheckpointError: As `first_run` and `check_kept`; also when the model runs, but a rank's share of it does not.
    """
    try:
        found = first_run(model, info)
    except UNRUNNABLE as error:
        # Experts that are chosen by values cannot run on the meta device; other models must run, except recurrent ones,
        # which do not declare whether they use the interface.
        if not (model._supports_attention_backend or model._is_stateful):  # noqa: SLF001
            raise refusal(info.family, OWN_ATTENTION) from error
        if share is not None:
            share(model)
        return
    if share is None:
        check_kept(found, info)
        return
    share(model)
    check_kept(first_run_of_share(model, info), info)


def first_run_of_share(model: Any, info: ModelInfo) -> FirstRun:
    """Do the first run with a rank's share of a model that runs as a whole.

    Raises:
        CheckpointError: As `first_run`; also when the share does not run.
    """
    try:
        return first_run(model, info)
    except UNRUNNABLE as error:
        why = "its modules do not run when split by transformers' plan"
        raise unshared(info.family, why) from error


@contextmanager
def _noting_rows(model: Any) -> Iterator[Mapping[str, set[int]]]:
    """Record the number of rows in calls of linear layers while the context is open."""
    seen: dict[str, set[int]] = {}

    def note(name: str, _: Any, given: tuple[Any, ...]) -> None:
        if given:
            seen.setdefault(name, set()).add(given[0].shape[:-1].numel())

    hooks = [
        module.register_forward_pre_hook(functools.partial(note, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _adaptable(model: Any, seen: Mapping[str, set[int]], states: RecurrentStates) -> frozenset[str]:
    """Return the linear layers that were called with both rows, and so with all rows of any step.

    Excluded are the head, which is called with some of the rows; recurrent layers, called per sequence; and single
    experts of a list, called with the rows routed to them, which may be these two by chance.
    """
    head = model.get_output_embeddings()
    named = dict(model.named_modules())
    within = [f"{name}." for name, module in named.items() if module in states.found]
    lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
    within += [f"{one}." for one in lists if any(one.startswith(f"{other}.") for other in lists)]
    return frozenset(
        name
        for name, rows in seen.items()
        if rows == {2} and named[name] is not head and not name.startswith(tuple(within))
    )


def _decoder_layers(model: Any, count: int) -> DecoderLayers | None:
    """Return the layers of a decoder; None if no module list of length `count` is found."""
    text = model.config.get_text_config()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return DecoderLayers(module, getattr(text, "layer_types", None) or ())
    return None


def _runs_without(model: Any, layers: DecoderLayers) -> bool:
    """Return whether the model runs without some of its layers: a layer may need results of another."""
    try:
        for kept in (0, 2):
            with layers.first(kept):
                _run_two_tokens(model)
    except UNRUNNABLE:
        return False
    return True


def _run_two_tokens(model: Any) -> None:
    device = next(model.parameters()).device
    places = torch.arange(2, device=device)[None]
    model(input_ids=torch.ones_like(places), position_ids=places, use_cache=False)
