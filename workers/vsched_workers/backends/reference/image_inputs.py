"""Image inputs of a vision-language model on the generic path: embedding rows and positions.

The model's own code puts the rows in place of placeholders (`mm_encoder_outputs`), scales them, and adds the levels of
deeper layers. It would find placeholders by their token ids; here their known positions decide, as a model may generate
a token with the placeholder's id.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vsched_workers.batching.packed_step import Images
from vsched_workers.batching.paged_attention import PagedStep
from vsched_workers.families.generic import (
    FIRST_POSITIONS,
    VIDEO_GRID,
    refusal,
    unpack_metadata,
)
from vsched_workers.families.qwen_positions import Items

MASKERS = ("get_placeholder_mask", "inputs_merger")
"""Methods that find placeholders by token id."""

ROUTED_TYPES = "moe_mm_token_type_ids"
"""An argument that routes tokens to separate experts: those of images, and the tokens around them."""


@dataclass
class EncodedImages(BaseModelOutputWithPooling):
    """Embedding rows in the format of `get_image_features`, including deepstack levels."""

    deepstack_features: list[list[torch.Tensor]] | None = None


class ImageInputs:
    """Arguments for a vision-language model without its vision tower."""

    def __init__(self, model: Any, *, levels: int) -> None:
        """Take the model; `levels` is the number of levels in an embedding row.

        Raises:
            CheckpointError: When the model does not accept embedding rows.
        """
        config = model.config
        self._owner = _owner(model)
        self._levels = levels
        self._image: int = _image_token(config)
        others = (getattr(config, name, None) for name in ("video_token_id", "audio_token_id"))
        special = {self._image, *others}
        self._neutral = next(token for token in range(len(special) + 1) if token not in special)
        self._placeholders: torch.Tensor | None = None
        self._as_list = self._indexed = True
        self._around: list[int] = []
        if ROUTED_TYPES in inspect.signature(self._owner.forward).parameters:
            self._around = [config.image_start_token_id, config.image_end_token_id]
        self._first = FIRST_POSITIONS.get(config.model_type, 0)
        self._rope: Any = getattr(self._owner, "get_rope_index", None)
        for name in MASKERS:
            if hasattr(self._owner, name):
                self._by_place(name)
                break
        else:
            raise refusal(config.model_type, "its own code to find image placeholders")

    def try_out(self, model: Any) -> None:
        """Find out the format of rows that the model accepts, and whether positions have a fourth axis for the text.

        Raises:
            CheckpointError: When no format is accepted.
        """
        device = next(model.parameters()).device
        hidden = model.config.get_text_config().hidden_size
        rows = torch.zeros(self._levels, 2, hidden, dtype=model.dtype, device=device)
        ids = torch.tensor([self._neutral, self._image, self._image], device=device)
        positions = torch.arange(3, device=device).expand(4, 1, 3)
        images = Images(np.array([1, 2]), rows)
        for self._as_list, self._indexed in product((True, False), (True, False)):
            try:
                model(use_cache=False, **self.arguments(ids, positions, images, None))
            except (TypeError, AttributeError, ValueError):
                continue
            return
        raise refusal(model.config.model_type, "an unknown format of image features")

    def only_places_rows(self, model: Any) -> bool:
        """Return whether the model does nothing but put rows in their places, besides running its decoder and its head.

        That is tested with random rows, with any attention implementation that needs no cache.
        """
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        axes = self._rope is not None or self._first
        if self._levels > 1 or self._around or axes or decoder is None or head is None:
            return False
        weight = next(decoder.parameters())
        ids = torch.tensor([self._neutral, self._image, self._image], device=weight.device)
        places = torch.arange(3, device=weight.device)
        rows = torch.randn(1, 2, model.config.get_text_config().hidden_size).to(weight)
        seen: dict[str, Any] = {}

        def note(_: Any, __: Any, given: dict[str, Any], made: Any) -> None:
            seen.update(given, made=made.last_hidden_state)

        hook = decoder.register_forward_hook(note, with_kwargs=True)
        try:
            images = Images(np.array([1, 2]), rows)
            given = self.arguments(ids, places.expand(4, 1, 3), images, None)
            logits = model(use_cache=False, **given).logits
        finally:
            hook.remove()
        wanted = model.get_input_embeddings()(ids)[None].clone()
        wanted[0, 1:] = rows[0]
        pairs = (
            (seen.get("inputs_embeds"), wanted),
            (seen.get("position_ids"), places[None]),
            (logits, head(seen["made"])),
        )
        return all(
            found is not None and found.dtype == right.dtype and torch.equal(found, right)
            for found, right in pairs
        )

    def arguments(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        images: Images | None,
        step: PagedStep | None,
    ) -> dict[str, Any]:
        """Return the model's arguments for a packed batch; shapes as in `pack`."""
        given: dict[str, Any] = {
            "input_ids": token_ids[None],
            "position_ids": self._axes(positions),
        }
        self._placeholders = torch.zeros_like(token_ids, dtype=torch.bool)
        if images is not None:
            rows = torch.from_numpy(images.rows).to(token_ids.device)
            self._placeholders[rows] = True
            given["mm_encoder_outputs"] = {"image": self._encoded(images.levels)}
        if self._around:
            given[ROUTED_TYPES] = self._routed(token_ids, step)
        return given

    def _axes(self, positions: torch.Tensor) -> torch.Tensor:
        if self._rope is None:
            return positions[1]
        return positions if self._indexed else positions[1:]

    def _encoded(self, levels: torch.Tensor) -> EncodedImages:
        rows: Any = [levels[0]] if self._as_list else levels[:1]
        deeper = [[level] for level in levels[1:]] or None
        return EncodedImages(pooler_output=rows, deepstack_features=deeper)

    def _routed(self, token_ids: torch.Tensor, step: PagedStep | None) -> torch.Tensor:
        """Return the types of tokens, [1, rows]; within a prompt only, tokens around an image have the image's type."""
        assert self._placeholders is not None, "they are found first"
        types = self._placeholders.clone()
        for segment in step.segments if step is not None else ():
            stop = segment.start + max(0, segment.prompt_length - segment.first)
            part = slice(segment.start, min(stop, segment.stop))
            for token in self._around:
                types[part] |= token_ids[part] == token
        return types[None].int()

    def _by_place(self, name: str) -> None:
        """Make a method find the placeholders by their known positions."""
        ask = getattr(self._owner, name)
        signature = inspect.signature(ask)

        def found(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            ids = bound.arguments["input_ids"]
            places = self._placeholders
            if ids is None or places is None:
                return ask(*args, **kwargs)
            others = torch.where(ids == self._image, self._neutral, ids)
            bound.arguments["input_ids"] = torch.where(places, self._image, others)
            return ask(*bound.args, **bound.kwargs)

        setattr(self._owner, name, found)

    def positions(
        self, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the positions of a prompt, int64 [3, tokens], and the delta of the positions after it."""
        count = len(token_ids)
        if self._rope is None or not items:
            plain = np.arange(self._first, count + self._first, dtype=np.int64)
            return np.broadcast_to(plain, (3, count)), self._first
        columns, whole = _unpruned(count, items)
        types = torch.zeros(1, whole, dtype=torch.int32)
        metadata = [unpack_metadata(item.metadata) for item in items]
        grids: list[npt.NDArray[Any]] = []
        end = -1
        for item, small in zip(items, metadata, strict=True):
            done = stop = 0
            for start, row, rows in item.rows(0, count):
                first, stop = columns[start] - (row - done), columns[start] + rows
                types[0, first:stop] = 2 if VIDEO_GRID in small else 1
                done = row + rows
            types[0, stop : stop + item.tokens - done] = 2
            if VIDEO_GRID in small:
                # Adjacent groups are one video, whose positions may have a temporal axis.
                if item.offset == end:
                    grids[-1] = grids[-1] + [[1, 0, 0]]
                else:
                    grids.append(small[VIDEO_GRID])
                end = item.runs[-1][1]
        ids = torch.full_like(types, self._neutral, dtype=torch.int64)
        ids[0, columns] = torch.from_numpy(token_ids.astype(np.int64))
        given = {
            "input_ids": torch.where(
                types.bool(), self._image, torch.where(ids == self._image, self._neutral, ids)
            ),
            **({VIDEO_GRID: torch.from_numpy(np.concatenate(grids))} if grids else {}),
            "mm_token_type_ids": types,
            "attention_mask": torch.ones_like(ids),
            **_joined([small for small in metadata if VIDEO_GRID not in small]),
        }
        requested = inspect.signature(self._rope).parameters
        found, _ = self._rope(**{name: given[name] for name in requested if name in given})
        positions = found[:, 0].numpy().astype(np.int64)[:, columns]
        # As in `qwen_positions`: tokens are generated from the last position on, not from the largest.
        return positions, int(positions[:, -1].max()) + 1 - count


def _unpruned(count: int, items: Items) -> tuple[npt.NDArray[np.int64], int]:
    """Return the index of each of `count` tokens in the prompt before rows of videos were pruned, and its length."""
    pruned = np.zeros(count + 1, np.int64)  # the number of rows before each token
    for item in items:
        done = 0
        for start, row, rows in item.rows(0, count):
            pruned[start] += row - done
            done = row + rows
        pruned[item.runs[-1][1]] += item.tokens - done
    return np.arange(count) + np.cumsum(pruned[:-1]), count + int(pruned.sum())


def _joined(metadata: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, torch.Tensor]:
    """Return the arrays of all images, concatenated."""
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in metadata]))
        for name in (metadata[0] if metadata else ())
    }


def _owner(model: Any) -> Any:
    """Return the submodule that computes image features and merges them."""
    inner = getattr(model, "model", None)
    return inner if inner is not None and hasattr(inner, "get_image_features") else model


def _image_token(config: Any) -> int:
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)
