"""A rank applies grammars to requests: masks, ends, and recovery after a loss."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.worker.test_generate_rank import GREEDY, Script, join, whole
from vsched.errors import RankDesync
from vsched.kernel.decisions import GenerateDecision, Join, Leave
from vsched.kernel.events import Finished
from vsched.types import FinishReason
from vsched.worker.contract import Batch, Sampled
from vsched.worker.generate_rank import GenerateRank

GRAMMAR = msgspec.structs.replace(GREEDY, grammar="counts down")


class Countdown:
    """Allows only the token below the last one; complete at 0, and broken by any other."""

    def __init__(self) -> None:
        self.mask: npt.NDArray[np.uint32] = np.array([1 << 5], np.uint32)
        self.followed: list[int] = []

    def check(self, grammar: str) -> None:
        raise NotImplementedError

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        for token in token_ids:
            fits = bool(int(self.mask[0]) >> token & 1)
            self.followed.append(token)
            if not fits:
                self.mask[0] = 0xFFFFFFFF
                return FinishReason.ERROR
            if token == 0:
                return FinishReason.STOP
            self.mask[0] = 1 << (token - 1)
        return None

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        raise NotImplementedError


class Countdowns:
    def __init__(self) -> None:
        self.made: list[Countdown] = []

    def check(self, grammar: str) -> None:
        raise NotImplementedError

    def matcher(self, grammar: str) -> Countdown:
        assert grammar == "counts down"
        self.made.append(Countdown())
        return self.made[-1]


class Masked(Script):
    """Records the masks of special rows."""

    def __init__(self, *steps: list[int]) -> None:
        super().__init__(*steps)
        self.masks: list[dict[int, int]] = []

    def step(self, batch: Batch) -> Sampled:
        masks = {row: one.token_mask for row, one in batch.special}
        self.masks.append({row: int(mask[0]) for row, mask in masks.items() if mask is not None})
        return super().step(batch)


class Watched(Countdown):
    """Counts reads of its mask after each token."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    @property
    def mask(self) -> npt.NDArray[np.uint32]:
        self.reads += 1
        return self._mask

    @mask.setter
    def mask(self, mask: npt.NDArray[np.uint32]) -> None:
        self._mask = mask

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        reason = super().follow(token_ids)
        self.reads = 0
        return reason


def rank_of(worker: Script, grammars: Countdowns | None) -> GenerateRank:
    embeddings = np.zeros((4, 4, 8), np.uint8)
    return GenerateRank(
        worker, embeddings, slots=4, context_tokens=64, block_size=4, grammars=grammars
    )


def test_generate_rank_masks_the_first_token_and_each_that_follows() -> None:
    worker, grammars = Masked([7, 5], [7, 4], [7, 3]), Countdowns()
    rank = rank_of(worker, grammars)
    joined = [join(1, 0, [1, 2]), join(2, 1, [1, 2], sampling=GRAMMAR)]
    rank.apply(GenerateDecision(1, joined=joined, chunks=[whole(0, 2), whole(1, 2)]))
    rank.apply(GenerateDecision(2))
    rank.apply(GenerateDecision(3))
    assert worker.masks == [{1: 1 << 5}, {1: 1 << 4}, {1: 1 << 3}]
    assert grammars.made[0].followed == [5, 4, 3]


def test_generate_rank_reads_masks_once_its_result_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next decision arrives meanwhile; masks of ended rows are not read."""
    monkeypatch.setattr(f"{__name__}.Countdown", Watched)
    worker, grammars = Masked([5, 5], [4, 4], [3]), Countdowns()
    rank = rank_of(worker, grammars)
    limited = msgspec.structs.replace(GRAMMAR, max_tokens=2)
    joined = [join(1, 0, [1], sampling=GRAMMAR), join(2, 1, [1], sampling=limited)]
    rank.apply(GenerateDecision(1, joined=joined, chunks=[whole(0, 1), whole(1, 1)]))
    first, second = grammars.made
    assert isinstance(first, Watched)
    assert isinstance(second, Watched)
    assert (first.reads, second.reads) == (0, 0)
    rank.look_ahead()
    assert (first.reads, second.reads) == (1, 1)
    rank.apply(GenerateDecision(2))
    rank.look_ahead()
    assert (first.reads, second.reads) == (1, 0)
    rank.apply(GenerateDecision(3))
    assert worker.masks == [{0: 1 << 5, 1: 1 << 5}, {0: 1 << 4, 1: 1 << 4}, {0: 1 << 3}]


def test_generate_rank_ends_a_whole_output_without_a_stop_token_even_at_the_limit() -> None:
    worker = Masked(*([token] for token in (5, 4, 3, 2, 1, 0)))
    rank = rank_of(worker, Countdowns())
    limited = msgspec.structs.replace(GRAMMAR, max_tokens=6)
    first = GenerateDecision(1, joined=[join(1, 0, [1], sampling=limited)], chunks=[whole(0, 1)])
    results = [rank.apply(first), *(rank.apply(GenerateDecision(step)) for step in range(2, 7))]
    assert [result.finished for result in results[:-1]] == [[]] * 5
    assert results[-1].finished == [Finished(0, 1, FinishReason.STOP)]
    assert rank.apply(GenerateDecision(7)).finished == []  # a step ahead, it yields nothing more


def test_generate_rank_cuts_an_output_at_its_limit() -> None:
    limited = msgspec.structs.replace(GRAMMAR, max_tokens=1)
    rank = rank_of(Masked([5]), Countdowns())
    first = GenerateDecision(1, joined=[join(1, 0, [1], sampling=limited)], chunks=[whole(0, 1)])
    assert rank.apply(first).finished == [Finished(0, 1, FinishReason.LENGTH)]


def test_generate_rank_ends_alone_what_its_grammar_cannot_follow() -> None:
    worker = Masked([7, 9], [8])
    rank = rank_of(worker, Countdowns())
    joined = [join(1, 0, [1]), join(2, 1, [1], sampling=GRAMMAR)]
    first = GenerateDecision(1, joined=joined, chunks=[whole(0, 1), whole(1, 1)])
    assert rank.apply(first).finished == [Finished(1, 2, FinishReason.ERROR)]
    assert rank.apply(GenerateDecision(2)).finished == []
    assert worker.batches[-1]["slots"] == [0]


def test_generate_rank_goes_on_with_a_grammar_after_a_preemption() -> None:
    worker, grammars = Masked([5], [4]), Countdowns()
    rank = rank_of(worker, grammars)
    rank.apply(
        GenerateDecision(1, joined=[join(1, 0, [1], sampling=GRAMMAR)], chunks=[whole(0, 1)])
    )
    rank.apply(GenerateDecision(2, left=[Leave(1, 0, keep=True)]))
    again = Join(1, 2, 0, 2, [3], None)
    rank.apply(GenerateDecision(3, joined=[again], chunks=[whole(2, 2)]))
    assert worker.masks[-1] == {0: 1 << 4}
    assert grammars.made[0].followed == [5, 4]
    assert len(grammars.made) == 1


def test_generate_rank_follows_again_what_was_generated_before_a_loss() -> None:
    worker, grammars = Masked([3]), Countdowns()
    back = join(1, 0, [1, 2, 5, 4], sampling=GRAMMAR)
    assert back.data is not None
    data = msgspec.structs.replace(back.data, prompt_length=2)
    first = GenerateDecision(
        1, joined=[msgspec.structs.replace(back, data=data)], chunks=[whole(0, 4)]
    )
    rank_of(worker, grammars).apply(first)
    assert worker.masks == [{0: 1 << 3}]
    assert grammars.made[0].followed == [5, 4, 3]


def test_generate_rank_without_grammars_follows_no_request_that_has_one() -> None:
    first = GenerateDecision(1, joined=[join(1, 0, [1], sampling=GRAMMAR)], chunks=[whole(0, 1)])
    with pytest.raises(RankDesync, match="has a grammar"):
        rank_of(Masked(), None).apply(first)
