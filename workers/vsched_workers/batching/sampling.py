"""Sampling of tokens from logits.

Most rows are greedy: one argmax call for all of them. The others are independent of each other: a row's token depends
on its own logits, history, seed and position, never on other rows. The uniform number of a draw is the first of a
Philox stream keyed by (seed, position): there is no generator state to be kept, restored or moved, and a request that
is recomputed after a preemption draws the same tokens again.

Order of the steps: penalties, logit bias, minimum length and bad words, the mask of allowed tokens, temperature, top-k,
top-p, min-p, draw. Log-probabilities are computed from the raw logits.

`StagedDraw` is the definition, in torch, for any device, all rows at once; `Backend.draw` may compute the same faster.
Its inputs are gathered on the host first, from the sequences as they are then. The device adds at most one token to
them, the last: the one that the step before has drawn and the host has not read. So a step can be started before the
tokens of the step before are known, and dropping such a step has no effect. Logits are sorted for top-k or top-p, as in
vLLM without FlashInfer. Sums are in float64: if a threshold or a draw falls within the rounding error of another order
(1e-15), results may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import Sampled, SequenceState, TokenLogprobs
from vsched_workers.device_copies import sent

SEED_MASK = (1 << 64) - 1

TEMPERATURE_MIN = 1e-6
"""Below this, every draw equals the argmax, and the quotient would overflow."""

UNDRAWN = -1
"""The token of a row from which none can be drawn: its largest logit is NaN or infinite."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SpecialRow:
    """A row that needs more than its argmax; `position` is the index of its new token."""

    row: int
    position: int
    sequence: SequenceState


Draw = Callable[[torch.Tensor, Sequence[SpecialRow]], npt.NDArray[np.int32]]
"""Samples the tokens of special rows, from the logits of all rows; see `draw_in_torch`."""


def choose_tokens(
    tokens: npt.NDArray[np.int32],
    logits: torch.Tensor,
    special: Sequence[SpecialRow],
    draw: Draw | None = None,
) -> Sampled:
    """Choose one token per row: sample the special rows, and write their tokens into `tokens`, the argmax of all rows.

    Shape: `tokens` [rows]; `logits` [rows, vocabulary], any float type.

    A row from which none can be drawn gets -1.
    """
    if not special:
        return Sampled(tokens=tokens)
    tokens[[entry.row for entry in special]] = (draw or draw_in_torch)(logits, special)
    return with_logprobs(tokens, logits, special)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the first largest logit of each row, [rows]; -1 for a row where it is no finite number."""
    tokens = logits.argmax(dim=-1)
    highest = logits.gather(-1, tokens[:, None])[:, 0]
    return torch.where(highest.isfinite(), tokens, UNDRAWN).int()


def with_logprobs(
    tokens: npt.NDArray[np.int32], logits: torch.Tensor, special: Sequence[SpecialRow]
) -> Sampled:
    """Return the tokens of all rows, and log-probabilities for the special rows that asked for them."""
    reporting = [
        entry
        for entry in special
        if entry.sequence.sampling.logprobs is not None and tokens[entry.row] != UNDRAWN
    ]
    if not reporting:
        return Sampled(tokens=tokens)
    if logits.device.type != "cpu":
        return Sampled(tokens=tokens, logprobs=logprobs_on_device(tokens, logits, reporting))
    reported: list[TokenLogprobs] = []
    for entry, raw in zip(reporting, _on_host(logits, reporting), strict=True):
        count = entry.sequence.sampling.logprobs or 0
        reported.append(_logprobs(raw, entry.row, int(tokens[entry.row]), count))
    return Sampled(tokens=tokens, logprobs=reported)


def logprobs_on_device(
    tokens: npt.NDArray[np.int32], logits: torch.Tensor, reporting: Sequence[SpecialRow]
) -> list[TokenLogprobs]:
    """Log-probabilities of all rows at once, on the device of the logits: the host takes milliseconds per row."""
    rows = np.array([entry.row for entry in reporting], np.int64)
    counts = [entry.sequence.sampling.logprobs or 0 for entry in reporting]
    values = logits[sent(rows, logits.device)].float()
    # Of equal logits, the first come first.
    best, ids = values.sort(dim=1, descending=True, stable=True)
    best, ids = best[:, : max(counts)].double(), ids[:, : max(counts)]
    exact = values.double()
    total = exact.logsumexp(dim=1, keepdim=True)
    own = exact.gather(1, sent(tokens[rows].astype(np.int64), logits.device)[:, None])
    chosen, likely, names = (
        each.cpu().tolist() for each in ((own - total)[:, 0], best - total, ids)
    )
    return [
        TokenLogprobs(row, logprob, list(zip(some[:count], top[:count], strict=True)))
        for row, logprob, some, top, count in zip(
            rows.tolist(), chosen, names, likely, counts, strict=True
        )
    ]


def draw_in_torch(logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
    """Return the token of each special row, -1 for none: the definition, which compiled samplers are tested against."""
    drawn: npt.NDArray[np.int32] = (
        StagedDraw(special, logits.shape[1]).draw_tokens(logits).cpu().numpy()
    )
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


def is_foreseeable(sequence: SequenceState) -> bool:
    """Return whether a draw can be staged before the last token is known.

    It cannot if the host needs that token to determine the allowed ones: with a token mask, or bad words of several
    tokens. Nor with log-probabilities, which are computed after the step from logits that the next one overwrites.
    """
    params = sequence.sampling
    return (
        sequence.token_mask is None
        and params.logprobs is None
        and all(len(word) == 1 for word in params.bad_words)
    )


class StagedDraw:
    """The draws of a step's special rows: their inputs, captured from the host now, to be run later."""

    def __init__(
        self, special: Sequence[SpecialRow], vocabulary: int, *, ahead: bool = False
    ) -> None:
        """Gather the inputs; with `ahead`, the last token is not known yet, and every row is foreseeable."""
        self._special = list(special)
        params = [entry.sequence.sampling for entry in special]
        self.rows = np.array([entry.row for entry in special], np.int64)
        self._numbers = np.array(
            [
                (
                    max(one.temperature, TEMPERATURE_MIN),
                    one.temperature == 0.0,
                    one.top_k if 0 < one.top_k < vocabulary else vocabulary,
                    one.top_p,
                    one.min_p,
                    uniform(one.seed or 0, entry.position),
                )
                for one, entry in zip(params, special, strict=True)
            ],
            np.float64,
        )
        self._sorts = any(0 < one.top_k < vocabulary or one.top_p < 1.0 for one in params)
        self._biases = self._gather_biases(vocabulary)
        self._penalties = _Penalties(special, vocabulary, ahead=ahead)
        self._masks = [
            (index, _allowed(entry.sequence.token_mask, vocabulary))
            for index, entry in enumerate(special)
            if entry.sequence.token_mask is not None
        ]

    def _gather_biases(self, vocabulary: int) -> tuple[npt.NDArray[Any], ...]:
        found = [
            (index, token, bias)
            for index, entry in enumerate(self._special)
            for token, bias in biases(entry, vocabulary).items()
        ]
        index, token, bias = zip(*found, strict=True) if found else ((), (), ())
        return np.array(index, np.int64), np.array(token, np.int64), np.array(bias, np.float32)

    def draw_tokens(self, logits: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        """Return the token of each special row, or -1 if none can be drawn; does not synchronize.

        Shape: logits [rows, vocabulary]; `last` int [rows] if `ahead`: the tokens that the host has not read; returns
        int32 [special rows].
        """
        device = logits.device
        rows = sent(self.rows, device)
        values = logits[rows].float()
        self._penalties.apply(values, last[rows] if last is not None else None)
        index, token, bias = (sent(each, device) for each in self._biases)
        if len(index):
            values[index, token] += bias
        for row, allowed in self._masks:
            values[row].masked_fill_(~sent(allowed, device), -torch.inf)
        temperature, is_greedy, top_k, top_p, min_p, number = sent(self._numbers, device).T
        highest = values.amax(dim=1)
        weights = torch.exp((values.double() - highest.double()[:, None]) / temperature[:, None])
        if self._sorts:
            weights = _cut(values, weights, top_k, top_p)
        weights = torch.where(weights >= min_p[:, None], weights, 0.0)
        cumulative = weights.cumsum(dim=1)
        target = number * cumulative[:, -1]
        place = (cumulative <= target[:, None]).sum(dim=1)
        last_kept = weights.shape[1] - 1 - (weights > 0.0).flip(1).int().argmax(dim=1)
        drawn = torch.minimum(place, last_kept)
        drawn = torch.where(is_greedy > 0, values.argmax(dim=1), drawn)
        return torch.where(highest.isfinite(), drawn, UNDRAWN).int()

    def rows_on(self, device: torch.device) -> torch.Tensor:
        """Return the row numbers, int64, on a device."""
        return sent(self.rows, device)


class _Penalties:
    """The penalties of some rows, and the token history that they count."""

    def __init__(self, special: Sequence[SpecialRow], vocabulary: int, *, ahead: bool) -> None:
        entries = [
            (index, entry)
            for index, entry in enumerate(special)
            if entry.sequence.sampling.has_penalty
        ]
        self._vocabulary = vocabulary
        self._rows = np.array([index for index, _ in entries], np.int64)
        self._numbers = np.array(
            [
                (
                    entry.sequence.sampling.repetition_penalty,
                    entry.sequence.sampling.presence_penalty,
                    entry.sequence.sampling.frequency_penalty,
                )
                for _, entry in entries
            ],
            np.float64,
        )
        histories, lengths = [np.empty(0, np.int32)], []
        for _, entry in entries:
            history = entry.sequence.tokens[: entry.position - int(ahead)]
            prompt = min(entry.sequence.prompt_length, len(history))
            histories.append(history)
            lengths += [prompt, len(history) - prompt]
        self._tokens = np.concatenate(histories)
        self._lengths = np.array(lengths, np.int32)  # of the prompt and the outputs of each row

    def apply(self, values: torch.Tensor, last: torch.Tensor | None) -> None:
        """Apply the penalties to the logits of the rows; `last` are outputs missing in the history, int [rows]."""
        if not len(self._rows):
            return
        device = values.device
        rows = sent(self._rows, device)
        shape = len(self._rows), self._vocabulary
        seen, times = torch.zeros((2, *shape), dtype=torch.int32, device=device)
        # In int32, and on the device: many long contexts have tens of millions of tokens.
        token, lengths = sent(self._tokens, device), sent(self._lengths, device)
        part = torch.repeat_interleave(lengths, output_size=len(token))
        within = (token < self._vocabulary).int()  # a head may be narrower than its embedding
        place = part.div(2, rounding_mode="floor").mul_(self._vocabulary)
        place += token.clamp(max=self._vocabulary - 1)
        seen.view(-1).index_add_(0, place, within)
        times.view(-1).index_add_(0, place, within * part.remainder(2))
        if last is not None:
            place, added = torch.arange(len(rows), device=device), last[rows].long()
            inside = (added < self._vocabulary).int()
            where = (place, added.clamp(max=self._vocabulary - 1))
            seen.index_put_(where, inside, accumulate=True)
            times.index_put_(where, inside, accumulate=True)
        repetition, presence, frequency = sent(self._numbers, device).T[:, :, None]
        chosen, factor = values[rows], repetition.float()
        scaled = torch.where(chosen > 0, chosen / factor, chosen * factor)
        chosen = torch.where(seen > 0, scaled, chosen)
        paid = (presence + frequency * times).float()
        values[rows] = torch.where(times > 0, chosen - paid, chosen)


def _cut(
    values: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the weights after top-k and then top-p, 0 for removed tokens; of equal logits the first are kept."""
    order = values.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    ordered = torch.where(rank < top_k[:, None], weights.gather(1, order), 0.0)
    wanted = top_p * ordered.sum(dim=1)
    before = ordered.cumsum(dim=1) - ordered
    # A top-p of 1 removes nothing, regardless of rounding.
    kept = (before < wanted[:, None]) | (top_p >= 1.0)[:, None] | (rank == 0)
    return torch.zeros_like(weights).scatter_(1, order, torch.where(kept, ordered, 0.0))


def _allowed(mask: npt.NDArray[np.uint32] | None, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Return the tokens that a packed mask allows, bool [vocabulary]."""
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary]
    found = np.zeros(vocabulary, np.bool_)
    found[: len(bits)] = bits
    return found
