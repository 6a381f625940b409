"""Prefill in steps with decodes is cut to the time budget of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsched.policy.requests import pairs_of
from vsched.policy_host.step_times import StepTimeModel, limit_share

DECODES, DECODE_NS, TOKEN_NS, PAIR_NS = 8, 5_000_000, 60_000, 40


def decodes_ns(decodes: int) -> int:
    """Time of a number of decodes: a shared part, and the time of a token for each."""
    return DECODE_NS + (decodes - DECODES) * TOKEN_NS if decodes else 0


def run_step(
    model: StepTimeModel, step: int, start: int, tokens: int, *, decodes: int = DECODES
) -> None:
    true_ns = tokens * TOKEN_NS + pairs_of(start, tokens) * PAIR_NS + decodes_ns(decodes)
    tell(model, step, start, tokens, int(true_ns), decodes=decodes)


def tell(
    model: StepTimeModel,
    step: int,
    start: int,
    tokens: int,
    busy_ns: int,
    *,
    decodes: int = DECODES,
) -> None:
    budget = model.budget_for(1_000_000, decodes=decodes)
    budget.add_chunk(start, tokens)
    model.note_step(step, decodes, budget)
    model.learn(step, busy_ns)


def learned(target_ns: int, ratio: float = 2.0, prefill_ns: int = 0) -> StepTimeModel:
    model = StepTimeModel(target_ns, ratio, block_size=16, prefill_ns=prefill_ns)
    for step, start in enumerate([0, 0, 1000, 4000, 0, 9000]):
        run_step(model, 2 * step, 0, 0)
        run_step(model, 2 * step + 1, start, 64 + 16 * step)
    return model


@pytest.mark.parametrize("start", [0, 2_000, 16_000])
def test_model_fills_a_step_up_to_its_target_wherever_the_chunk_lies(start: int) -> None:
    target_ns = 40_000_000
    tokens = learned(target_ns).budget_for(100_000, decodes=DECODES).tokens_at(start)
    assert tokens % 16 == 0
    for count, fits in ((tokens, True), (tokens + 16, False)):
        step_ns = DECODE_NS + count * TOKEN_NS + pairs_of(start, count) * PAIR_NS
        assert (step_ns <= target_ns * 1.01) == fits


@pytest.mark.parametrize(
    ("target_ms", "ratio", "share", "left_ms"),
    [
        (25, 2, 1.0, 20),
        (6, 4, 1.0, 15),
        # A long queue doubles the ratio but not the target.
        (6, 4, 2.0, 35),
        (50, 4, 2.0, 45),
        # A share of the limit leaves three quarters of the time of the decodes.
        (40, 8, 0.5, 15),
        (80, 8, 0.5, 35),
        (40, 8, 0.01, 3.75),
        (1e-6, 1.5, 0.01, 2.5),
    ],
)
def test_model_reports_how_long_decodes_may_wait_for_something_else(
    target_ms: float, ratio: float, share: float, left_ms: float
) -> None:
    """The budget of prefill in a step also applies to an encoder in the same process; without decodes there is none."""
    left_ns = learned(int(target_ms * 1e6), ratio).left_ns(DECODES, share)
    assert left_ns == pytest.approx(left_ms * 1e6, rel=0.01)


def test_model_has_no_limit_without_decodes_or_a_target() -> None:
    assert learned(DECODE_NS, ratio=1).left_ns(DECODES) >= 1
    assert learned(25_000_000).left_ns(0) == learned(0).left_ns(DECODES) == 0
    assert learned(25_000_000).budget_for(5_000, decodes=0).tokens_at(16_000) == 5_000
    assert learned(0).budget_for(5_000, decodes=DECODES).tokens_at(16_000) == 5_000


@pytest.mark.parametrize("target_ns", [0, 1_000_000_000])
def test_step_has_a_time_limit_even_if_nothing_decodes(target_ns: int) -> None:
    """A request that arrives during a long prompt waits for it."""
    model = learned(target_ns, prefill_ns=40_000_000)
    for start in (0, 2_000, 16_000):
        budget = model.budget_for(100_000, decodes=0)
        tokens = budget.tokens_at(start)
        for count, fits in ((tokens, True), (tokens + 16, False)):
            spent_ns = count * TOKEN_NS + pairs_of(start, count) * PAIR_NS
            assert (spent_ns <= 40_400_000) == fits
        assert budget.tokens_at(start, tokens * 1.5) == tokens * 1.5, "no short last chunk"
        assert budget.tokens_at(start, tokens * 1.5 + 1) == tokens
        budget.add_chunk(start, tokens)
        assert budget.tokens_at(start) in {0, 16}, "at most one more block, which ends soon after"
    slow = learned(target_ns, ratio=100.0, prefill_ns=1)
    tokens = slow.budget_for(100_000, decodes=0).tokens_at(0)
    alone_ns = tokens * TOKEN_NS + pairs_of(0, tokens) * PAIR_NS
    assert alone_ns == pytest.approx(100 * slow.decode_ns(1), rel=0.02)


@pytest.mark.parametrize(
    ("decoding", "waiting", "share"),
    [
        *[(0, 1, 1.0), (5, 1, 1.0), (40, 0, 0.125), (40, 1, 0.125), (40, 2, 0.25), (24, 8, 1.0)],
        *[(2, 4, 1.0), (2, 6, 1.5), (2, 9, 2.0)],
    ],
)
def test_limit_follows_the_waiting_requests_for_each_decoding_one(
    decoding: int, waiting: int, share: float
) -> None:
    assert limit_share(decoding, waiting) == share


@pytest.mark.parametrize("decodes", [1, 8, 32, 128])
def test_model_extrapolates_the_time_of_many_decodes_from_few(decodes: int) -> None:
    """While requests wait, every step has prefill: that number of decodes is never seen alone."""
    model = learned(1, 5.0)
    for step in range(100, 110):
        run_step(model, step, 0, 64 + step, decodes=decodes)
    assert model.decode_ns(decodes) == pytest.approx(decodes_ns(decodes), rel=0.05)
    assert model.costs[0] == pytest.approx(TOKEN_NS, rel=0.05)
    tokens = model.budget_for(5_000, decodes=decodes).tokens_at(0)
    prefill_ns = tokens * TOKEN_NS + pairs_of(0, tokens) * PAIR_NS
    assert prefill_ns == pytest.approx(4 * decodes_ns(decodes), rel=0.1)


def test_model_takes_no_decode_for_dearer_than_the_mean_of_those_it_saw() -> None:
    """On a GPU a prompt token can cost as much as a decode, and all share the reading of the weights."""
    model = StepTimeModel(1, 2.0, block_size=16)
    run_step(model, 0, 0, 0)
    for step in range(1, 10):
        tell(model, step, 0, 16, 100 * DECODE_NS)
    assert model.costs[0] > DECODE_NS
    assert model.decode_ns(2 * DECODES) <= 2 * DECODE_NS


def test_model_gives_a_block_at_least_while_time_is_left_and_then_nothing() -> None:
    """A target that nothing fits in must not stop prefill."""
    budget = learned(6_000_000).budget_for(5_000, decodes=DECODES)
    assert budget.tokens_at(10_000_000) == 16
    budget.add_chunk(10_000_000, 16)
    assert budget.spent
    assert budget.tokens_at(0) == 0


def test_model_begins_no_further_chunk_in_less_than_the_time_of_a_block() -> None:
    """Time left after a chunk is cut to whole blocks would otherwise go to another prompt in every step."""
    budget = learned(40_000_000).budget_for(5_000, decodes=DECODES)
    budget.add_chunk(0, budget.tokens_at(0))
    assert budget.spent
    assert budget.tokens_at(0) == 0
    unlimited = learned(40_000_000).budget_for(5_000, decodes=0)
    unlimited.add_chunk(0, 100)
    assert unlimited.tokens_at(0) == 4_900


def test_model_believes_new_times_after_some_steps() -> None:
    model = learned(40_000_000)
    before = model.budget_for(5_000, decodes=DECODES).tokens_at(0)
    for step in range(100, 140):
        tell(model, step, 0, 64, DECODE_NS + 64 * TOKEN_NS * 4)
    assert model.budget_for(5_000, decodes=DECODES).tokens_at(0) < before / 2


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20_000), st.integers(0, 512), st.integers(0, 10**10), st.integers(0, 64)
        ),
        max_size=30,
    ),
    st.integers(0, 20_000),
)
def test_time_model_always_predicts(steps: list[tuple[int, int, int, int]], start: int) -> None:
    """Noise and nonsense in the times never stop prefill."""
    model = StepTimeModel(1_000_000, 2.0, block_size=16)
    for step, (at, tokens, busy_ns, decodes) in enumerate(steps):
        tell(model, step, at, tokens, busy_ns, decodes=decodes)
    assert min(model.costs) >= 0
    assert 16 <= model.budget_for(2_048, decodes=DECODES).tokens_at(start) <= 2_048


def serve(model: StepTimeModel, steps: range, *, slower: float = 1.0) -> list[int]:
    """Run steps, each with the longest chunk that fits, and return the lengths of the chunks."""
    chunks = []
    for step in steps:
        budget = model.budget_for(2048, decodes=DECODES)
        tokens = budget.tokens_at(0)
        budget.add_chunk(0, tokens)
        model.note_step(step, DECODES, budget)
        true_ns = DECODE_NS + tokens * TOKEN_NS + pairs_of(0, tokens) * PAIR_NS
        model.learn(step, int(true_ns * slower))
        chunks.append(tokens)
    return chunks


@pytest.mark.parametrize("slower", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("steps", [1, 20, 300])
def test_model_chunks_recover_soon_after_a_slow_stretch(slower: float, steps: int) -> None:
    model = learned(40_000_000)
    before = serve(model, range(100, 120))[-1]
    serve(model, range(200, 200 + steps), slower=slower)
    after = serve(model, range(600, 616))
    assert after[-1] == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("tokens", [0, 64])
def test_model_is_hardly_moved_by_one_step_in_which_the_machine_stood_still(tokens: int) -> None:
    """A suspended VM: one step took half a minute."""
    model = learned(40_000_000)
    before = model.budget_for(100_000, decodes=DECODES).tokens_at(0)
    tell(model, 100, 0, tokens, 30_000_000_000)
    assert model.decode_ns(DECODES) == pytest.approx(DECODE_NS, rel=0.11)
    assert model.budget_for(100_000, decodes=DECODES).tokens_at(0) == pytest.approx(before, abs=32)
