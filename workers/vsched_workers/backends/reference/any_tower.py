"""The vision tower of the generic path: transformers' own `get_image_features`, one image at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched.worker.contract import EncodeJob
from vsched_workers.backends.reference.whole_model import layer_kind, pass_rows
from vsched_workers.device_copies import sent
from vsched_workers.families.generic import VIDEO_GRID, unpack_metadata
from vsched_workers.families.qwen_image import LEVELS, PIXELS, flat_patches
from vsched_workers.families.qwen_levels import pixel_values
from vsched_workers.memory.sparse_runs import is_left_out, is_sparse


class AnyTower:
    """A vision-language model without its language model, for one image per call: shapes may differ between images.

    Attributes:
        batches: See `FamilyTower`.
        module: The model.
    """

    batches = False

    def __init__(self, model: Any, dtype: torch.dtype, device: str = "cpu") -> None:
        """Take the model; `dtype` is the data type of its weights."""
        self.module = model
        self._dtype = dtype
        self._device = device
        self._owner = model if hasattr(model, "get_image_features") else model.model
        kinds = inspect.signature(self._owner.get_image_features).parameters
        self._names = {
            name
            for name, parameter in kinds.items()
            if parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
        }
        self._has_videos = hasattr(self._owner, "get_video_features")
        leave_out_layers(self.layers)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Its layers: the module list with the most submodules; empty if there is none."""
        lists = [each for each in self.module.modules() if isinstance(each, nn.ModuleList)]
        return list(max(lists, key=lambda each: len(list(each.modules())), default=()))

    def encode(self, jobs: Sequence[EncodeJob]) -> torch.Tensor:
        """Return the embedding rows of the single job."""
        (job,) = jobs
        if LEVELS in job.arrays:
            grid = unpack_metadata(job.metadata).get(VIDEO_GRID)
            return self.encode_group(job.arrays, grid)[: job.tokens]
        return self({**job.arrays, **unpack_metadata(job.metadata)})

    def __call__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> torch.Tensor:
        """Return the embedding rows of one image, [tokens, levels * hidden], as for an image alone.

        Arrays that its `get_image_features` has no parameters for are left out.
        """
        given = {
            name: self._tensor(array)
            for name, array in arrays.items()
            if not self._names or name in self._names
        }
        return self._rows_of(self._owner.get_image_features(**given, return_dict=True))

    def encode_group(
        self, arrays: Mapping[str, npt.NDArray[Any]], grid: npt.NDArray[Any] | None
    ) -> torch.Tensor:
        """Return the embedding rows of a video of one frame group, and those that follow each video, if any.

        `arrays` are its pixels as bytes and the table of their values, `grid` its patches in time, height and width.
        """
        pixels = arrays[PIXELS]
        # A frame without patches is like one large patch of a still image.
        group = {**arrays, PIXELS: pixels.reshape(1, -1) if grid is None else pixels}
        values = pixel_values(
            self._tensor(flat_patches(group)),
            [group],
            self._dtype,
            temporal=1 if grid is None else len(pixels),
        )
        if grid is None:
            values = values.view(pixels.shape)
        if not self._has_videos:
            return self._rows_of(self._owner.get_image_features(values, return_dict=True))
        given = {} if grid is None else {VIDEO_GRID: self._tensor(grid)}
        return self._rows_of(
            self._owner.get_video_features(pixel_values_videos=values, **given, return_dict=True)
        )

    def _rows_of(self, out: Any) -> torch.Tensor:
        levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        return torch.cat([_rows(level) for level in levels], dim=-1).to(self._dtype)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        # The copy makes the tensor writable: the arena's view is read-only.
        tensor = sent(np.array(array), self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _rows(features: Any) -> torch.Tensor:
    """Return the features of one image, one tensor or several (as one per crop), as [tokens, hidden]."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def leave_out_layers(layers: Sequence[nn.Module]) -> None:
    """Have sparse runs copy rows past a layer of transformers, except the first two of each kind and the last.

    The last one runs while the results of all others are still held, if the tower collects them.
    """
    kinds = [layer_kind(layer) for layer in layers]
    formats: dict[Hashable, int | None] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        first = next(iter(inspect.signature(layer.forward).parameters), "")
        if kind in kinds[index + 1 :] and first == "hidden_states":
            layer.forward = functools.partial(_run_or_copy, layer.forward, kind, formats)


def _run_or_copy(
    run: Callable[..., Any],
    kind: Hashable,
    formats: dict[Hashable, int | None],
    hidden_states: torch.Tensor,
    *more: Any,
    **given: Any,
) -> Any:
    if not is_sparse():
        return run(hidden_states, *more, **given)
    # Layers of one kind may attend within windows or to all patches, by their arguments.
    sizes = [
        each.shape if isinstance(each, torch.Tensor) else each
        for each in (*more, *given.values())
        if isinstance(each, torch.Tensor | int)
    ]
    key = (kind, hidden_states.shape, *sizes)
    if is_left_out(key):
        return pass_rows(formats[key], hidden_states.clone())
    found = run(hidden_states, *more, **given)
    formats[key] = None if isinstance(found, torch.Tensor) else len(found) - 1
    return found
