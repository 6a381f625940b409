"""Speculative decoding keeps the distribution: output frequencies match their probabilities."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.worker.test_generate_rank import Script, whole
from vsched.kernel.decisions import DraftGrant, GenerateDecision, Join, Leave, RequestData
from vsched.kernel.events import Drafted
from vsched.sim.ranks.symbolic_workers import stand_in_info
from vsched.types import SamplingParams
from vsched.wire import GenerateResult
from vsched.worker.contract import Batch, Sampled, SequenceState
from vsched.worker.drafting.model import DraftModel, DraftWorker
from vsched.worker.generate_rank import GenerateRank
from vsched_workers.batching.sampling import choose_tokens
from vsched_workers.batching.step_rows import special_rows

TOKENS = 5
ANSWERS = 1000
LENGTH = 3
PROMPT = [0, 1]
SAMPLING = SamplingParams(temperature=0.9, max_tokens=LENGTH, ignore_eos=True)


class Markov(Script):
    """A model whose logits depend on the last token, with the real sampler."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self._logits = logits

    def prepare(self, sequence: SequenceState) -> None:
        """There is nothing to prepare."""

    def step(self, batch: Batch) -> Sampled:
        last = batch.decode_tokens.tolist()
        last += [
            int(chunk.sequence.tokens[chunk.stop - 1]) for chunk in batch.chunks if chunk.samples
        ]
        logits = torch.from_numpy(self._logits[last])
        tokens = logits.argmax(dim=1).numpy().astype(np.int32)
        return choose_tokens(tokens, logits, special_rows(batch))


def answers(target: Markov, draft: Markov) -> tuple[Counter[tuple[int, ...]], list[Drafted]]:
    """Return the frequency of each output, with a seed for each, and the results of draft tokens."""
    model = DraftModel(
        DraftWorker(draft, stand_in_info(context_tokens=16, vocab_size=TOKENS)),
        vocabulary=TOKENS,
        blocks=4,
        block_size=8,
        chunk_tokens=8,
        batch_tokens=16,
    )
    rank = GenerateRank(
        target,
        np.zeros((1, 1, 1), np.uint8),
        slots=4,
        context_tokens=16,
        block_size=8,
        draft_model=model,
    )
    counts: Counter[tuple[int, ...]] = Counter()
    drafted: list[Drafted] = []
    step = 0
    left: list[Leave] = []
    known = np.asarray(PROMPT, np.int32).tobytes()
    for seed in range(ANSWERS):
        sampling = SamplingParams(
            temperature=SAMPLING.temperature, max_tokens=LENGTH, ignore_eos=True, seed=seed
        )
        data = RequestData(known, len(PROMPT), [], sampling, ())
        joined = Join(seed, 0, 0, len(PROMPT), [0, 1], data)
        step += 1
        chunk = whole(0, len(PROMPT))
        result = rank.apply(GenerateDecision(step, left=left, joined=[joined], chunks=[chunk]))
        answer = [_token(result)]
        granted = [DraftGrant(0, LENGTH, 0, True)]
        while len(answer) < LENGTH:
            step += 1
            result = rank.apply(GenerateDecision(step, granted=granted))
            granted = []
            answer += [_token(result), *(token for one in result.drafted for token in one.tokens)]
            drafted += result.drafted
        counts[tuple(answer)] += 1
        left = [Leave(seed, 0, keep=False)]
    return counts, drafted


def _token(result: GenerateResult) -> int:
    return int(np.frombuffer(result.tokens, np.int32)[0])


def likelihoods(logits: npt.NDArray[np.float32]) -> dict[tuple[int, ...], float]:
    """Return the probability of each output."""
    odds = np.exp(logits.astype(np.float64) / SAMPLING.temperature)
    odds /= odds.sum(axis=1, keepdims=True)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*known, token): likely * odds[(*PROMPT, *known)[-1], token]
            for known, likely in found.items()
            for token in range(TOKENS)
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.7, 3.0])
def test_answers_are_as_frequent_as_they_are_likely(noise: float) -> None:
    """Of 125 outputs; the statistic with 124 degrees of freedom stays below the 1 in 10,000 limit. Seeds are fixed."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1.2, (TOKENS, TOKENS)).astype(np.float32)
    other = (logits + rng.normal(0, noise, logits.shape)).astype(np.float32)
    counts, drafted = answers(Markov(logits), Markov(other))
    assert sum(counts.values()) == ANSWERS
    statistic = sum(
        (counts[answer] - ANSWERS * likely) ** 2 / (ANSWERS * likely)
        for answer, likely in likelihoods(logits).items()
    )
    assert statistic < 193, "answers that are not drawn as the model has them"
    right = sum(len(one.tokens) for one in drafted) / sum(one.drafts for one in drafted)
    # Independent draws would agree in under a third of the cases.
    assert right == 1 if not noise else 0.1 < right < 1
    assert right > 0.6 or noise > 1
