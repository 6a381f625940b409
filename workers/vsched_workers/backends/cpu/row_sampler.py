"""Token sampling on the host: converts sampling parameters of rows to arrays for the compiled sampler."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels.kept_tokens import Buffers, make_buffers
from vsched_workers.backends.cpu.kernels.sampling import (
    ROW_DTYPES,
    RowParameters,
    draw_rows,
)
from vsched_workers.batching.sampling import (
    SEED_MASK,
    TEMPERATURE_MIN,
    SpecialRow,
    biases,
    check_highest,
)


def draw_compiled(logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
    """Return the token of each special row, as `draw_in_torch` does; logits bfloat16 or float32.

    Raises:
        FloatingPointError: There is no finite logit to sample from.
    """
    logits = logits.contiguous()
    vocabulary = logits.shape[1]
    halves, singles = np.empty((0, vocabulary), np.uint16), np.empty((0, vocabulary), np.float32)
    if logits.dtype == torch.bfloat16:
        halves = logits.view(torch.int16).numpy().view(np.uint16)
    else:
        singles = logits.numpy()
    tokens, highest = np.empty(len(special), np.int32), np.empty(len(special), np.float32)
    draw_rows(
        *(halves, singles, _parameters(special, vocabulary)),
        *(_buffers(vocabulary), tokens, highest),
    )
    if not np.isfinite(highest).all():
        for entry, top in zip(special, highest.tolist(), strict=True):
            if entry.sequence.sampling.temperature != 0.0:
                check_highest(top, entry)
    return tokens


@functools.lru_cache(maxsize=2)  # a draft model's vocabulary may be padded to another size
def _buffers(vocabulary: int) -> Buffers:
    return make_buffers(vocabulary)


def _parameters(special: Sequence[SpecialRow], vocabulary: int) -> RowParameters:
    scalars: list[tuple[Any, ...]] = []
    histories: list[npt.NDArray[np.int32]] = []
    biased: list[int] = []
    bias: list[float] = []
    masks: list[npt.NDArray[np.uint32]] = []
    starts, bias_starts = [0], [0]
    for entry in special:
        sequence, params = entry.sequence, entry.sequence.sampling
        history = sequence.tokens[: entry.position if params.has_penalty else 0]
        histories.append(history)
        starts.append(starts[-1] + len(history))
        added = biases(entry, vocabulary)
        biased += added
        bias += added.values()
        bias_starts.append(len(biased))
        if sequence.token_mask is not None:
            masks.append(sequence.token_mask)
        greedy = params.temperature == 0.0
        scalars.append(
            (
                entry.row,
                0.0 if greedy else 1.0 / max(params.temperature, TEMPERATURE_MIN),
                params.top_k,
                params.top_p,
                params.min_p,
                ((params.seed or 0) & SEED_MASK, entry.position),
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
                sequence.prompt_length,
                len(masks) - 1 if sequence.token_mask is not None else -1,
            )
        )
    row, inverse, top_k, top_p, min_p, key, repetition, presence, frequency, prompts, mask_of = zip(
        *scalars, strict=True
    )
    mask = np.stack(masks) if masks else np.empty((0, 0), np.uint32)
    fields = (
        *(row, inverse, top_k, top_p, min_p, key, repetition, presence, frequency),
        *(np.concatenate(histories), starts, prompts, biased, bias, bias_starts, mask, mask_of),
    )
    return RowParameters(*map(np.asarray, fields, ROW_DTYPES))
