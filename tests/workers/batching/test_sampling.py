"""The sampler alone: filters, penalties, limits, the inputs of a draw; compiled, and in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.workers.backends.cuda.on_host import DEVICE, CudaOnHost
from tests.workers.batching.special_rows import OPTIONS, sequence, special
from tests.workers.properties import REPEATABLE, usually
from vsched.types import SamplingParams
from vsched.worker.contract import Sampled, WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu.kernels import sampling as kernels
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching.sampling import (
    TEMPERATURE_MIN,
    UNDRAWN,
    SpecialRow,
    StagedDraw,
    choose_tokens,
    draw_in_torch,
    is_foreseeable,
    logprobs_on_device,
    uniform,
    with_logprobs,
)

VOCABULARY = 50


def sample(logits: torch.Tensor, special: Sequence[SpecialRow]) -> Sampled:
    """Choose tokens as a worker on a CPU does."""
    backend = choose_backend(WorkerSettings(), torch.bfloat16)
    return choose_tokens(backend.argmax(logits), logits, special, backend.draw)


def logits_of(values: dict[int, float], base: float = 0.0) -> torch.Tensor:
    logits = torch.full((1, VOCABULARY), base)
    for token, value in values.items():
        logits[0, token] = value
    return logits


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def test_repetition_penalty_counts_prompt_and_output() -> None:
    """Positive logits are divided, negative ones multiplied."""
    logits = logits_of({3: 2.0, 4: 1.9, 5: 1.8})
    params = greedy(repetition_penalty=1.5)
    assert sample(logits, [special(0, params, [3], [4])]).tokens[0] == 5
    negative = logits_of({3: -1.0, 4: -1.2}, base=-9.0)
    assert sample(negative, [special(0, params, [3])]).tokens[0] == 4


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = logits_of({3: 2.0, 4: 1.5})
    assert sample(logits, [special(0, greedy(presence_penalty=1.0), [3])]).tokens[0] == 3
    assert sample(logits, [special(0, greedy(presence_penalty=1.0), [1], [3])]).tokens[0] == 4
    frequency = greedy(frequency_penalty=0.3)
    assert sample(logits, [special(0, frequency, [1], [3])]).tokens[0] == 3
    assert sample(logits, [special(0, frequency, [1], [3, 3])]).tokens[0] == 4


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    """A stop token cannot be drawn before `min_tokens` outputs; ids beyond the vocabulary are ignored."""
    logits = logits_of({2: 5.0, 6: 4.0})
    stops = frozenset({2, 10**6})
    params = greedy(min_tokens=2)
    assert sample(logits, [special(0, params, [1], [9], stops)]).tokens[0] == 6
    assert sample(logits, [special(0, params, [1], [9, 9], stops)]).tokens[0] == 2


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Penalties change the chosen token, not the reported values."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, VOCABULARY))).float()
    best = int(logits.argmax())
    params = greedy(logprobs=5, repetition_penalty=9.0)
    found = sample(logits, [special(0, params, [best])])
    wanted = torch.log_softmax(logits[0].double(), dim=-1)
    entry = found.logprobs[0]
    assert entry.row == 0
    assert found.tokens[0] != best
    assert entry.logprob == pytest.approx(float(wanted[found.tokens[0]]))
    top = torch.topk(wanted, 5)
    assert [token for token, _ in entry.top] == top.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(top.values.tolist())


@pytest.mark.parametrize("count", [0, 1, 7, VOCABULARY + 3])
def test_logprobs_on_a_device_equal_those_on_a_host(count: int) -> None:
    """All rows at once; many logits are equal, as in bfloat16, and of these the first come first."""
    chance = np.random.default_rng(count)
    logits = torch.from_numpy(chance.integers(0, 9, (5, VOCABULARY))).bfloat16()
    logits[:, 3] = -torch.inf
    rows = [special(row, SamplingParams(logprobs=(count, 2)[row % 2])) for row in (0, 1, 4)]
    tokens = chance.integers(4, VOCABULARY, 5).astype(np.int32)
    wanted = with_logprobs(tokens, logits, rows).logprobs
    found = logprobs_on_device(tokens, logits.to(DEVICE), rows)
    assert [each.row for each in found] == [0, 1, 4]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top])


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([3, 300, 5000]),
    temperature=st.sampled_from([1.0, 1e-300]),
    top_p=st.floats(0.0, 0.99),
    top_k=st.sampled_from([0, 2, 40, 10**6]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    levels=st.sampled_from([2, 10**6]),
)
@example(seed=313, size=3, temperature=1.0, top_p=0.75, top_k=40, min_p=0.0, levels=10**6)
@REPEATABLE
def test_filters_equal_the_full_sort(
    seed: int, size: int, temperature: float, top_p: float, top_k: int, min_p: float, levels: int
) -> None:
    """What is kept is what sorting the whole vocabulary keeps, many equal logits included."""
    values = np.floor(np.random.default_rng(seed).random(size) * levels) / levels * 5
    logits = torch.from_numpy(values).float()[None]
    params = SamplingParams(
        seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    token = int(sample(logits, [special(0, params)]).tokens[0])
    weights = np.exp(
        (logits[0].double().numpy() - float(logits.max())) / max(temperature, TEMPERATURE_MIN)
    )
    order = np.argsort(-weights, kind="stable")[: top_k or size]
    cumulative = np.cumsum(weights[order])
    kept = np.sort(order[: int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1])
    kept = kept[weights[kept] >= min_p]
    drawn = np.cumsum(weights[kept])
    assert token == kept[int(np.searchsorted(drawn, uniform(seed, 1) * drawn[-1], side="right"))]


def test_uniform_depends_on_seed_and_position_only() -> None:
    assert uniform(3, 4) == uniform(3, 4)
    assert len({uniform(seed, position) for seed in range(8) for position in range(8)}) == 64
    assert 0.0 <= uniform(-1, 0) < 1.0
    assert uniform(2**64 + 5, 1) == uniform(5, 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each_case(
    "options", [{"temperature": 0.0, "logprobs": 2}, {"top_p": 1.0}, {"top_p": 0.9, "logprobs": 0}]
)
def test_no_token_is_drawn_from_logits_that_are_no_numbers(
    value: float, options: dict[str, Any]
) -> None:
    """Without the check, the result would be the last token, or an index out of range; other rows are drawn."""
    rows = [special(row, SamplingParams(seed=1, **options)) for row in range(2)]
    logits = torch.cat([logits_of({3: value}), logits_of({})])
    sampled = sample(logits, rows)
    assert sampled.tokens[0] == UNDRAWN != sampled.tokens[1]
    assert {each.row for each in sampled.logprobs} <= {1}
    if "top_p" in options:
        staged = StagedDraw(rows, VOCABULARY).draw_tokens(logits).tolist()
        assert staged[0] == UNDRAWN != staged[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Backend, CudaOnHost, choose_backend])
def test_row_without_a_finite_largest_logit_has_no_token(make: type, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    rows[0, 7] = rows[0, 9] = 40.0
    rows[1], rows[2, 3], rows[3] = math.nan, math.inf, -math.inf
    found = make(WorkerSettings(), dtype).argmax(rows.to(dtype))
    assert found.tolist() == [7, *[UNDRAWN] * 3, int(rows[4].to(dtype).argmax())]


def drawn(logits: torch.Tensor, rows: Sequence[SpecialRow]) -> list[int]:
    """Draw with the compiled sampler, and compare with torch's."""
    backend = choose_backend(WorkerSettings(), torch.bfloat16)
    found: list[int] = backend.draw(logits, rows).tolist()
    assert found == draw_in_torch(logits, rows).tolist()
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.float32, 0.0), (torch.bfloat16, 1.0), (torch.float32, 9.0)]
)
def test_compiled_sampler_equals_torch(
    options: dict[str, Any], dtype: torch.dtype, spread: float
) -> None:
    """Also with ties, forbidden tokens and a mask; a row is the same alone and in a batch."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((6, 5000)) * spread).to(dtype)
    logits[:, ::7] = -torch.inf
    rows = [
        special(row, SamplingParams(seed=row, **options), [1, 9], [5, 9, 9]) for row in range(6)
    ]
    rows[2].sequence.token_mask = rng.integers(0, 2**32, 100, dtype=np.uint32)
    patches = np.repeat(
        np.array([0, 2**32 - 1], np.uint32), [50, 50]
    )  # words without and with all tokens
    patches[::5] = rng.integers(0, 2**32, 20, dtype=np.uint32)
    rows[3].sequence.token_mask = patches
    together = drawn(logits, rows)
    assert together[2] < 3200
    assert patches[together[3] // 32] >> (together[3] % 32) & 1
    for index, row in enumerate(rows):
        assert drawn(logits, [row]) == [together[index]]


LARGE = 100_000


@pytest.mark.parametrize("shape", usually("trained", of=["flat", "clustered", "apart", "tied"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_sampler_equals_torch_at_a_large_vocabulary(
    shape: str, dtype: torch.dtype
) -> None:
    """Thresholds are estimated on some blocks, which may mislead; or logits are few values far apart."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(LARGE) * (0.5 if shape == "flat" else 2.0)
    if shape == "trained":
        values[rng.integers(0, LARGE, 30)] = np.linspace(20, 12, 30)
    if shape == "clustered":
        values[np.arange(LARGE) // 256 % 16 == 0] -= 6.0
    if shape == "apart":
        values += 90.0
    if shape == "tied":
        values = np.floor(values)
    logits = torch.from_numpy(values)[None].to(dtype)
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_p": 0.5, "temperature": 0.8},
        {"top_k": 30_000},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 2_000, "top_p": 0.9, "min_p": 0.2},
        {"top_p": 0.99, "min_p": 0.01, "frequency_penalty": 0.2},
    ]
    drawn(
        logits,
        [special(0, SamplingParams(seed=seed, **each)) for each in options for seed in range(4)],
    )


def test_a_request_compiles_nothing() -> None:
    """Loading has compiled the sampler for all kinds of logits and parameters."""
    kernels.warm_up()
    known = list(kernels.draw_rows.signatures)
    for dtype in (torch.bfloat16, torch.float32):
        rows = [special(0, SamplingParams(seed=1, **each)) for each in OPTIONS.values()]
        rows[0].sequence.token_mask = np.full(2, 2**32 - 1, np.uint32)
        drawn(torch.ones(1, VOCABULARY, dtype=dtype), rows)
    assert kernels.draw_rows.signatures == known


def test_top_k_reaches_below_all_weights() -> None:
    """One logit is far above the others; the threshold lies at zero weights, or among forbidden tokens."""
    logits = torch.full((1, 3000), -400.0)
    logits[0, 17] = 0.0
    assert drawn(logits, [special(0, SamplingParams(seed=1, top_k=5, top_p=0.9))]) == [17]
    logits[0, 18:] = -torch.inf
    assert drawn(logits, [special(0, SamplingParams(seed=1, top_k=100))]) == [17]


def test_draws_pass_a_chi_square_test() -> None:
    """4,000 draws of eight tokens at as many positions of a request, compared with their probabilities."""
    values = np.array([1.6, 1.2, 0.9, 0.5, 0.0, -0.4, -0.9, -1.5])
    expected = 4000 * np.exp(values) / np.exp(values).sum()
    state = sequence(SamplingParams(seed=3), [1], [0] * 4000)
    rows = [SpecialRow(row=at, position=at + 1, sequence=state) for at in range(4000)]
    found = sample(torch.from_numpy(values).float().repeat(4000, 1), rows).tokens
    statistic = float(((np.bincount(found, minlength=8) - expected) ** 2 / expected).sum())
    assert statistic < 24.3, "of seven degrees of freedom, one in a thousand is above"


def test_empty_token_mask_is_reported() -> None:
    row = special(0, SamplingParams(seed=1))
    row.sequence.token_mask = np.zeros(2, np.uint32)
    assert sample(logits_of({3: 1.0}), [row]).tokens.tolist() == [UNDRAWN]


WORDS = 5000


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"min_tokens": 4, "temperature": 0.0},
        {"logit_bias": ((3, 9.0),), "bad_words": ((7,),)},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.9},
        {"frequency_penalty": 30.0, "temperature": 0.0},
    ],
)
def test_draw_is_staged_before_the_last_token_is_known(options: dict[str, Any]) -> None:
    """The device adds that token; the host's placeholder is not read."""
    logits = torch.full((6, WORDS), -9.0)
    logits[:, 3:9] = torch.tensor([3.0, 2.9, 5.0, 2.7, 2.6, 2.5])
    rows = [
        special(row, SamplingParams(seed=row, **options), [1, 9], [5, 9, 5], frozenset({5}))
        for row in range(6)
    ]
    expected = draw_in_torch(logits, rows).tolist()
    last = torch.tensor([5] * 6, dtype=torch.int32)
    for entry in rows:
        entry.sequence.tokens[entry.position - 1] = 4
    staged = StagedDraw(rows, WORDS, ahead=True)
    for entry in rows:
        entry.sequence.tokens[:] = 8  # after staging, the host's changes do not matter
    assert staged.draw_tokens(logits, last).tolist() == expected


@pytest.mark.parametrize(
    ("options", "foreseeable"),
    [
        ({}, True),
        ({"presence_penalty": 1.0, "min_tokens": 3, "bad_words": ((4,),)}, True),
        ({"bad_words": ((4, 5),)}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_features_that_need_the_last_token_on_the_host(
    options: dict[str, Any], foreseeable: bool
) -> None:
    sequence = special(0, SamplingParams(**options)).sequence
    assert is_foreseeable(sequence) == foreseeable
    sequence.token_mask = np.ones(1, np.uint32)
    assert not is_foreseeable(sequence)
