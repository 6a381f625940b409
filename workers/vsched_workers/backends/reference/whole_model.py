"""A model of any architecture over paged attention: transformers' own modules, its head among them.

Nothing is known of such a model but that its attention goes through transformers' interface. So a first run of two
tokens, in which nothing is attended, tells what each layer keeps of a token, and refuses what keeps anything else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched.types import ModelInfo
from vsched_workers.batching.packed_step import Images
from vsched_workers.batching.paged_attention import NAME, KvShape, PagedStep, running
from vsched_workers.families.generic import OWN_ATTENTION, refusal

FIRST_RUN = "vsched_first_run"


class WholeModel:
    """Runs transformers' model over a packed row; see `LanguageLayers`, but what it returns are logits."""

    def __init__(self, model: Any, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> None:
        """Take the model; `send` brings row numbers to its device."""
        self._model = model
        self._send = send
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the logits of the wanted rows, [wanted, vocabulary]."""
        assert images is None, "it is a model of text alone"
        rows = self._send(wanted)
        options = {"logits_to_keep": rows} if self._keeps else {}
        with running(step):
            out = self._model(
                input_ids=token_ids[None], position_ids=positions[0], use_cache=False, **options
            )
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps else logits[rows]


class DecoderLayers:
    """The layers of a model, of which some can be left out for a while.

    Layers may be of several kinds (dense and mixtures of experts, windows and none), which need memory of their own.
    """

    def __init__(self, layers: nn.ModuleList, stated: Sequence[str]) -> None:
        """Take the layers in order, and the kinds that the configuration states, if it does."""
        self._layers: list[Any] = list(layers)
        names: Sequence[str] = stated or [""] * len(layers)
        self._kinds = [(name, *_parts(layer)) for name, layer in zip(names, layers, strict=True)]
        self._returns_tuple = [False] * len(layers)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Learn what layers return, their rows alone or a tuple that begins with them, while the context is open."""

        def note(index: int, *seen: object) -> None:
            self._returns_tuple[index] = isinstance(seen[-1], tuple)

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
            self._layers[index].forward = _pass_tuple if self._returns_tuple[index] else _pass
        try:
            yield
        finally:
            for index in left_out:
                del self._layers[index].forward


def _pass(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return hidden_states


def _pass_tuple(hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    return hidden_states, None, None


def _parts(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return what two layers of one kind have in common: modules, and the shapes of their weights."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple(weight.shape for weight in layer.parameters())


@torch.inference_mode()
def first_run(model: Any, family: str) -> tuple[list[KvShape], DecoderLayers | None]:
    """Return what each layer keeps of a token; and the layers, where some can be left out.

    Raises:
        CheckpointError: When a layer does not attend to the tokens before it, through the interface, once.
    """
    from transformers import AttentionInterface

    shapes: dict[int, KvShape] = {}
    strange: list[str] = []
    kinds: Sequence[str] = getattr(model.config, "layer_types", None) or ()

    def note(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)
        if sliding_window is None and kinds and kinds[layer] == "sliding_attention":
            strange.append("windows that attention is not told of")
        if layer in shapes:
            strange.append("layers that attend more than once")
        if attention_mask is not None:
            strange.append("masks of its own")
        if not getattr(module, "is_causal", True):
            strange.append("layers that see later tokens")
        shapes[layer] = KvShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(FIRST_RUN, note)
    count = model.config.num_hidden_layers
    layers = _decoder_layers(model, count)
    model.set_attn_implementation(FIRST_RUN)
    try:
        with layers.noting() if layers is not None else nullcontext():
            _run_two_tokens(model)
        if not shapes:
            strange.append(OWN_ATTENTION)
        if sorted(shapes) != list(range(count)):
            strange.append(f"{count} layers, of which {len(shapes)} attend through the interface")
        if strange:
            raise refusal(family, strange[0])
        found = [shapes[layer] for layer in range(count)]
        return found, layers if layers is not None and _runs_without(model, layers) else None
    finally:
        model.set_attn_implementation(NAME)


def check_kv(shapes: Sequence[KvShape], info: ModelInfo) -> None:
    """Check that layers keep of a token what the engine was told: it has shared the memory out by that.

    Raises:
        CheckpointError: When they do not.
    """
    written, told = sum(each.values for each in shapes) * info.itemsize, info.kv_bytes_per_token
    if written != told:
        what = f"layers that keep {written} bytes of a token, where config.json tells {told}"
        raise refusal(info.family, what)


def check_built(model: Any, info: ModelInfo) -> None:
    """Do the first run with a model that has no weights yet, on the meta device, where that is possible.

    Raises:
        CheckpointError: As `first_run` and `check_kv`.
    """
    try:
        shapes, _ = first_run(model, info.family)
        check_kv(shapes, info)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        # Experts that are chosen by values cannot run without any; other models have no excuse.
        if not model._supports_attention_backend:  # noqa: SLF001
            raise refusal(info.family, OWN_ATTENTION) from error


def _decoder_layers(model: Any, count: int) -> DecoderLayers | None:
    """Return the layers of a decoder; None where no list of so many modules is found."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return DecoderLayers(module, getattr(model.config, "layer_types", None) or ())
    return None


def _runs_without(model: Any, layers: DecoderLayers) -> bool:
    """Return whether the model can do without some of its layers: one may need what another left behind."""
    try:
        for kept in (0, 2):
            with layers.first(kept):
                _run_two_tokens(model)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


def _run_two_tokens(model: Any) -> None:
    device = next(model.parameters()).device
    places = torch.arange(2, device=device)[None]
    model(input_ids=torch.ones_like(places), position_ids=places, use_cache=False)
