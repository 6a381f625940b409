"""Chooses tokens from logits.

Most rows want the argmax; it is one call for all of them. The others are few or at least independent of each other:
what is drawn for a row depends on its own logits, its own history, its seed and its position, never on the rows
beside it. The uniform number of a draw is the first of a Philox stream keyed by (seed, position): no state has to
be kept, restored or moved, and a request that is recomputed after a preemption draws what it drew before.

Order of the steps: penalties, minimum length, temperature, top-k, top-p, min-p, draw. Log-probabilities are those
of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import SamplingParams
from vsched.worker.contract import Sampled, SequenceState, TokenLogprobs

_SEED_MASK = (1 << 64) - 1

_TEMPERATURE_MIN = 1e-6
"""Below it every draw is the argmax already, and the quotient would overflow."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SpecialRow:
    """A row that needs more than its argmax; `position` is the index that the new token will have."""

    row: int
    position: int
    sequence: SequenceState


def choose_tokens(
    tokens: npt.NDArray[np.int32], logits: torch.Tensor, special: Sequence[SpecialRow]
) -> Sampled:
    """Choose one token per row: the argmax, which `tokens` holds and is overwritten in, but for the special rows.

    Shape: `tokens` [rows]; `logits` [rows, vocabulary], any float type.
    """
    if not special:
        return Sampled(tokens=tokens)
    picked = logits[[entry.row for entry in special]].float().cpu().numpy()
    reported: list[TokenLogprobs] = []
    for entry, raw in zip(special, picked, strict=True):
        params = entry.sequence.sampling
        adjusted = _adjust(raw, entry)
        token = int(adjusted.argmax()) if params.temperature == 0.0 else _draw(adjusted, entry)
        tokens[entry.row] = token
        if params.logprobs is not None:
            reported.append(_logprobs(raw, entry.row, token, params.logprobs))
    return Sampled(tokens=tokens, logprobs=reported)


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) of one draw."""
    key = np.array([seed & _SEED_MASK, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _adjust(raw: Logits, entry: SpecialRow) -> Logits:
    """Apply penalties and the minimum length; returns `raw` itself where there is nothing to do."""
    params, sequence = entry.sequence.sampling, entry.sequence
    outputs = sequence.tokens[sequence.prompt_length : entry.position]
    below_minimum = len(outputs) < params.min_tokens and bool(sequence.stop_token_ids)
    if not (below_minimum or _has_penalty(params)):
        return raw
    adjusted = raw.copy()
    if params.repetition_penalty != 1.0:
        seen = np.unique(sequence.tokens[: entry.position])
        values = adjusted[seen]
        penalty = np.float32(params.repetition_penalty)
        adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
    if len(outputs) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(outputs, return_counts=True)
        adjusted[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(
            np.float32
        )
    if below_minimum:
        stops = [token for token in sequence.stop_token_ids if 0 <= token < len(adjusted)]
        adjusted[stops] = -np.inf
    return adjusted


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _draw(logits: Logits, entry: SpecialRow) -> int:
    """Draw a token; the candidates stay in order of their ids, whatever filters thin them out.

    Raises:
        FloatingPointError: When there is nothing to draw from.
    """
    params = entry.sequence.sampling
    scaled = logits.astype(np.float64)
    highest = scaled.max()
    if not np.isfinite(highest):
        raise FloatingPointError(
            f"the largest logit of token {entry.position} of request {entry.sequence.number} is {highest}, no finite "
            "number. Remedy: where activations overflow float16, set model.dtype to bfloat16 or float32; otherwise "
            "check the weights."
        )
    scaled -= highest
    scaled /= max(params.temperature, _TEMPERATURE_MIN)
    candidates: npt.NDArray[np.int64] | None = None
    if 0 < params.top_k < len(scaled):
        candidates = _largest(scaled, params.top_k, np.partition(scaled, -params.top_k))
        scaled = scaled[candidates]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        # Sorting values alone is vectorised, sorting positions by value is not.
        ordered = np.sort(weights)
        reached = np.searchsorted(np.cumsum(ordered[::-1]), params.top_p * weights.sum()) + 1
        kept = _largest(weights, min(int(reached), len(weights)), ordered)
        weights = weights[kept]
        candidates = kept if candidates is None else candidates[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p * weights.max())
        weights = weights[kept]
        candidates = kept if candidates is None else candidates[kept]
    cumulative = np.cumsum(weights)
    target = uniform(params.seed, entry.position) * cumulative[-1]
    place = min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)
    return place if candidates is None else int(candidates[place])


def _largest(
    values: npt.NDArray[np.float64], count: int, partitioned: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the places of the `count` largest values, ascending; of equal values the first win.

    `partitioned` holds the same values with the count-th largest in its place.
    """
    least = partitioned[-count]
    places = np.flatnonzero(values >= least)
    surplus = len(places) - count
    if surplus > 0:
        equal = np.flatnonzero(values[places] == least)
        places = np.delete(places, equal[-surplus:])
    return places


def _logprobs(raw: Logits, row: int, token: int, count: int) -> TokenLogprobs:
    values = raw.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top: list[tuple[int, float]] = []
    if count > 0:
        size = min(count, len(values))
        head = _largest(values, size, np.partition(values, -size))
        head = head[np.argsort(-values[head], kind="stable")]
        top = [(int(index), float(values[index])) for index in head]
    return TokenLogprobs(row=row, logprob=float(values[token]), top=top)
