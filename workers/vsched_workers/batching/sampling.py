"""Sampling of tokens from logits.

Most rows are greedy: one argmax call for all of them. The others are independent of each other: a row's token depends
on its own logits, history, seed and position, never on other rows. The uniform number of a draw is the first of a
Philox stream keyed by (seed, position): there is no generator state to be kept, restored or moved, and a request that
is recomputed after a preemption draws the same tokens again.

Order of the steps: penalties, logit bias, minimum length and bad words, the mask of allowed tokens, temperature, top-k,
top-p, min-p, draw. Log-probabilities are computed from the raw logits.

This is the definition, in numpy; `Backend.draw` may compute the same faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import Sampled, SequenceState, TokenLogprobs

SEED_MASK = (1 << 64) - 1

TEMPERATURE_MIN = 1e-6
"""Below this, every draw equals the argmax, and the quotient would overflow."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SpecialRow:
    """A row that needs more than its argmax; `position` is the index of its new token."""

    row: int
    position: int
    sequence: SequenceState


Draw = Callable[[torch.Tensor, Sequence[SpecialRow]], npt.NDArray[np.int32]]
"""Samples the tokens of special rows, from the logits of all rows; see `draw_in_numpy`."""


def choose_tokens(
    tokens: npt.NDArray[np.int32],
    logits: torch.Tensor,
    special: Sequence[SpecialRow],
    draw: Draw | None = None,
) -> Sampled:
    """Choose one token per row: sample the special rows, and write their tokens into `tokens`, the argmax of all rows.

    `draw` is the backend's; without it, numpy's.

    Shape: `tokens` [rows]; `logits` [rows, vocabulary], any float type.

    Raises:
        FloatingPointError: When no token can be drawn.
    """
    if not special:
        return Sampled(tokens=tokens)
    drawn = (draw or draw_in_numpy)(logits, special)
    tokens[[entry.row for entry in special]] = drawn
    return with_logprobs(tokens, logits, special)


def with_logprobs(
    tokens: npt.NDArray[np.int32], logits: torch.Tensor, special: Sequence[SpecialRow]
) -> Sampled:
    """Return the tokens of all rows, and log-probabilities for the special rows that asked for them."""
    reporting = [entry for entry in special if entry.sequence.sampling.logprobs is not None]
    if not reporting:
        return Sampled(tokens=tokens)
    reported: list[TokenLogprobs] = []
    for entry, raw in zip(reporting, _on_host(logits, reporting), strict=True):
        count = entry.sequence.sampling.logprobs or 0
        reported.append(_logprobs(raw, entry.row, int(tokens[entry.row]), count))
    return Sampled(tokens=tokens, logprobs=reported)


def draw_in_numpy(logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
    """Return the token of each special row: the definition, which compiled samplers are tested against.

    Raises:
        FloatingPointError: When no token can be drawn.
    """
    drawn = np.empty(len(special), np.int32)
    for index, (entry, raw) in enumerate(zip(special, _on_host(logits, special), strict=True)):
        adjusted = _adjust(raw, entry)
        greedy = entry.sequence.sampling.temperature == 0.0
        drawn[index] = int(adjusted.argmax()) if greedy else _draw(adjusted, entry)
    return drawn


def _on_host(logits: torch.Tensor, special: Sequence[SpecialRow]) -> Logits:
    found: Logits = logits[[entry.row for entry in special]].float().cpu().numpy()
    return found


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) of one draw."""
    key = np.array([seed & SEED_MASK, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def biases(entry: SpecialRow, vocabulary: int) -> dict[int, float]:
    """Return the biases of single logits of a row: its logit bias, and minus infinity for forbidden tokens.

    Forbidden are stop tokens below the minimum length, and the last token of a bad word after its other tokens.
    """
    params, sequence = entry.sequence.sampling, entry.sequence
    added = {token: bias for token, bias in params.logit_bias if token < vocabulary}
    outputs = sequence.tokens[sequence.prompt_length : entry.position]
    forbidden: list[int] = []
    if len(outputs) < params.min_tokens:
        forbidden += sequence.stop_token_ids
    for *before, last in params.bad_words:
        started = len(before) <= len(outputs)
        if started and outputs[len(outputs) - len(before) :].tolist() == before:
            forbidden.append(last)
    added.update((token, -np.inf) for token in forbidden if 0 <= token < vocabulary)
    return added


def _adjust(raw: Logits, entry: SpecialRow) -> Logits:
    """Apply penalties, biases and the mask; return `raw` itself if there is nothing to apply."""
    params, sequence = entry.sequence.sampling, entry.sequence
    added = biases(entry, len(raw))
    if not (added or params.has_penalty or sequence.token_mask is not None):
        return raw
    adjusted = raw.copy()
    if params.has_penalty:
        _penalise(adjusted, entry)
    for token, bias in added.items():
        adjusted[token] += np.float32(bias)
    if sequence.token_mask is not None:
        allowed = np.unpackbits(sequence.token_mask.view(np.uint8), bitorder="little")
        adjusted[: len(allowed)][allowed[: len(adjusted)] == 0] = -np.inf
        adjusted[len(allowed) :] = -np.inf
    return adjusted


def _penalise(adjusted: Logits, entry: SpecialRow) -> None:
    params, sequence = entry.sequence.sampling, entry.sequence
    tokens = sequence.tokens[: entry.position]
    seen = np.unique(tokens[tokens < len(adjusted)])
    values = adjusted[seen]
    penalty = np.float32(params.repetition_penalty)
    adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
    outputs = tokens[sequence.prompt_length :]
    ids, counts = np.unique(outputs[outputs < len(adjusted)], return_counts=True)
    adjusted[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(
        np.float32
    )


def _draw(logits: Logits, entry: SpecialRow) -> int:
    """Draw a token; candidates stay in order of their ids through all filters.

    Raises:
        FloatingPointError: When no token can be drawn.
    """
    params = entry.sequence.sampling
    scaled = logits.astype(np.float64)
    highest = scaled.max()
    check_highest(float(highest), entry)
    scaled -= highest
    scaled /= max(params.temperature, TEMPERATURE_MIN)
    candidates: npt.NDArray[np.int64] | None = None
    if 0 < params.top_k < len(scaled):
        candidates = _largest(scaled, params.top_k, np.partition(scaled, -params.top_k))
        scaled = scaled[candidates]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        # Sorting values is vectorized, sorting indices by value is not.
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
    target = uniform(params.seed or 0, entry.position) * cumulative[-1]
    place = min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)
    return place if candidates is None else int(candidates[place])


def check_highest(highest: float, entry: SpecialRow) -> None:
    """Check that a token can be drawn.

    Raises:
        FloatingPointError: When the highest logit is not finite.
    """
    if not math.isfinite(highest):
        raise FloatingPointError(
            f"the largest logit of token {entry.position} of request {entry.sequence.number} is {highest}, no finite "
            "number. Remedy: where activations overflow float16, set model.dtype to bfloat16 or float32; otherwise "
            "check the weights, and that logit_bias and bad_words leave a token."
        )


def _largest(
    values: npt.NDArray[np.float64], count: int, partitioned: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest values, ascending; of equal values the first win.

    `partitioned` has the same values with the count-th largest in its sorted position.
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
