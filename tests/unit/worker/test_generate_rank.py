"""The generate side of a rank: slots, batches, ends of requests, grammars, and decisions that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from vsched.errors import RankDesync
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.kernel.events import Finished
from vsched.sim.ranks.symbolic_model import ChoiceMatcher, SymbolicGrammars, allowed_tokens
from vsched.types import FinishReason, ItemPlace, SamplingParams
from vsched.wire import GenerateResult, SlotLogprob
from vsched.worker.contract import (
    Batch,
    Chunk,
    GenerateWorker,
    PromptLogprobs,
    Sampled,
    SequenceState,
    TokenLogprobs,
)
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.memory import DeviceMemory
from vsched.worker.slots import STOP_TOKENS_MAX


def _reported(index: int, chunk: Chunk) -> PromptLogprobs:
    numbers = np.arange(chunk.reported, dtype=np.int32)
    values = numbers.astype(np.float32)
    return PromptLogprobs(index, values, numbers, numbers, values)


class Script(GenerateWorker):
    """A worker that samples scripted tokens, row by row, and keeps copies of its batches."""

    def __init__(self, *steps: list[int]) -> None:
        self.steps = list(steps)
        self.batches: list[dict[str, Any]] = []
        self.sequences: list[SequenceState] = []
        self.logprobs: list[TokenLogprobs] = []

    def device_memory(self) -> DeviceMemory:
        raise NotImplementedError

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        raise NotImplementedError

    def drop_kv(self) -> None:
        raise NotImplementedError

    def prepare(self, sequence: SequenceState) -> None:
        self.sequences.append(sequence)
        sequence.state = f"state of {sequence.number}"

    def step(self, batch: Batch) -> Sampled:
        self.batches.append(
            {
                "slots": batch.decode_slots.tolist(),
                "tokens": batch.decode_tokens.tolist(),
                "positions": batch.decode_positions.tolist(),
                "numbers": [sequence.number for sequence in batch.decode_sequences],
                "chunks": [(one.slot, one.start, one.stop, one.samples) for one in batch.chunks],
                "told": [one.reported for one in batch.chunks],
                "items": [list(one.items) for one in batch.chunks],
                "known": [one.sequence.tokens[: one.stop].tolist() for one in batch.chunks],
                "special": [
                    (row, sequence.number, sequence.outputs.tolist())
                    for row, sequence in batch.special
                ],
                "masks": {
                    row: allowed_tokens(sequence.token_mask)
                    for row, sequence in batch.special
                    if sequence.token_mask is not None
                },
            }
        )
        prompts = [_reported(index, one) for index, one in enumerate(batch.chunks) if one.reported]
        return Sampled(np.asarray(self.steps.pop(0), np.int32), self.logprobs, prompts)


GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


def rank_of(worker: Script, **options: Any) -> GenerateRank:
    limits = {"slots": 4, "context_tokens": 64, "block_size": 4}
    options = {**limits, "grammars": SymbolicGrammars(), **options}
    return GenerateRank(worker, np.zeros((4, 4, 8), np.uint8), **options)


def join(
    number: int,
    slot: int,
    tokens: list[int],
    *,
    sampling: SamplingParams = GREEDY,
    stops: tuple[int, ...] = (),
    items: Sequence[ItemPlace] = (),
    prompt_length: int = 0,
    adapter: int = 0,
    blocks: Sequence[int] = (),
    computed: int = 0,
) -> Join:
    known, length = np.asarray(tokens, np.int32).tobytes(), prompt_length or len(tokens)
    data = RequestData(known, length, [*items], sampling, stops, adapter)
    own = [10 * number + index for index in range(-(-len(tokens) // 4))]
    return Join(number, slot, computed, len(tokens), [*blocks] or own, data)


def whole(slot: int, length: int) -> ChunkPlan:
    return ChunkPlan(slot, 0, length, [])


def prefill(*joined: Join, step: int = 1, **more: Any) -> GenerateDecision:
    """Have requests join, and compute the rest of their prompts in one chunk each."""
    chunks = [ChunkPlan(one.slot, one.computed, one.length, []) for one in joined]
    return GenerateDecision(step, joined=[*joined], chunks=chunks, **more)


def tokens_of(result: GenerateResult) -> list[int]:
    return [int(token) for token in np.frombuffer(result.tokens, np.int32)]


def numbers_of(result: GenerateResult) -> list[int]:
    return [int(number) for number in np.frombuffer(result.numbers, np.int32)]


def test_generate_rank_rows_are_decodes_by_slot_then_chunks() -> None:
    """The order of rows is fixed; a chunk that does not end its prompt yields no row."""
    worker = Script([21, 22], [31, 32, 33])
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 3, [1, 2]), join(2, 0, [3, 4])))
    joined = [join(3, 1, [5, 6, 7]), join(4, 2, [8])]
    chunks = [ChunkPlan(1, 0, 2, []), whole(2, 1)]
    result = rank.apply(GenerateDecision(2, joined=joined, chunks=chunks))
    last = worker.batches[-1]
    assert (last["slots"], last["tokens"], last["numbers"]) == ([0, 3], [22, 21], [2, 1])
    assert last["chunks"] == [(1, 0, 2, False), (2, 0, 1, True)]
    assert tokens_of(result) == [31, -1, 33, 32]
    assert numbers_of(result) == [2, 3, 4, 1]


LENGTH, STOP, MOST_STOPS = FinishReason.LENGTH, FinishReason.STOP, range(20, 20 + STOP_TOKENS_MAX)


@pytest.mark.parametrize(
    ("sampling", "stops", "sampled", "reason"),
    [
        pytest.param({"max_tokens": 3}, (), [7, 7, 7], LENGTH, id="length"),
        pytest.param({"max_tokens": 1}, (), [7], LENGTH, id="one token"),
        pytest.param({}, (9,), [7, 9], STOP, id="stop token"),
        pytest.param({}, (9,), [9], STOP, id="stop token at once"),
        pytest.param({}, (9, 4), [7, 4], STOP, id="second stop token"),
        pytest.param({"max_tokens": 2}, (9,), [7, 9], STOP, id="both at once"),
        pytest.param({"min_tokens": 3}, (9,), [9, 9, 9], STOP, id="min_tokens"),
        pytest.param({"max_tokens": 2, "min_tokens": 5}, (9,), [9, 9], LENGTH, id="max first"),
        pytest.param({}, (*MOST_STOPS,), [7, 35], STOP, id="most stops"),
    ],
)
def test_generate_rank_ends_a_sequence(
    sampling: dict[str, int], stops: tuple[int, ...], sampled: list[int], reason: FinishReason
) -> None:
    """The rank itself reports the end, in the step of the last token; afterwards the slot yields nothing."""
    worker = Script(*[[token] for token in sampled])
    rank = rank_of(worker)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 50, **sampling})  # type: ignore[arg-type]
    results = [rank.apply(prefill(join(1, 0, [1, 2], sampling=params, stops=stops)))]
    results += [rank.apply(GenerateDecision(step)) for step in range(2, len(sampled) + 1)]
    ends = [one.finished for one in results]
    assert ends == [[]] * (len(sampled) - 1) + [[Finished(0, 1, reason)]]
    steps = len(worker.batches)
    after = rank.apply(GenerateDecision(9))
    assert (tokens_of(after), after.finished) == ([-1] * 4, [])
    assert len(worker.batches) == steps, "without work, the worker is not called"


def test_generate_rank_ends_alone_a_request_without_a_token_to_draw() -> None:
    """A row of logits that are no numbers ends its request with an error, and no other one."""
    worker = Script([5, 6], [-1, 7], [8])
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 0, [1, 2]), join(2, 1, [3, 4])))
    result = rank.apply(GenerateDecision(2))
    assert result.finished == [Finished(0, 1, FinishReason.ERROR)]
    assert tokens_of(result) == [-1, 7, -1, -1]
    assert tokens_of(rank.apply(GenerateDecision(3))) == [-1, 8, -1, -1]


@pytest.mark.parametrize(("stops", "special"), [((9,), [(0, 1, [])]), ((), [])])
def test_a_least_number_of_tokens_is_special_only_where_it_forbids_a_stop_token(
    stops: tuple[int, ...], special: list[tuple[int, int, list[int]]]
) -> None:
    """With `ignore_eos` and no stop tokens, as in benchmarks, a greedy row stays as cheap as it is."""
    worker = Script([7])
    params = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=5)
    rank_of(worker).apply(prefill(join(1, 0, [1, 2], sampling=params, stops=stops)))
    assert worker.batches[0]["special"] == special


def test_generate_rank_slot_that_is_left_is_as_new() -> None:
    """Stop tokens, limits and sampling of the previous request do not leak."""
    worker = Script([7], [9], [9], [9])
    rank = rank_of(worker, slots=1)
    picky = SamplingParams(max_tokens=50, presence_penalty=1.0)
    rank.apply(prefill(join(1, 0, [1], sampling=picky, stops=(9,))))
    result = rank.apply(prefill(join(2, 0, [5]), step=2, left=[Leave(1, 0, keep=False)]))
    assert result.finished == []
    assert (tokens_of(result), numbers_of(result)) == ([9], [2])
    assert worker.batches[0]["special"] == [(0, 1, [])]
    assert worker.batches[1]["special"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"joined": [join(2, 0, [1])]}, "request 2 joins slot 0, which is taken"),
        ({"joined": [Join(1, 1, 0, 9, [1], None)]}, "with 9 tokens; it is 1 tokens long here"),
        ({"joined": [Join(5, 1, 0, 2, [1], None)]}, "joins with 2 tokens; it is unknown here"),
        ({"left": [Leave(1, 1, keep=True)]}, "leaves slot 1, which it has not"),
        ({"left": [Leave(2, 0, keep=True)]}, "leaves slot 0, which it has not"),
        ({"chunks": [whole(3, 2)]}, "a chunk for slot 3, which is empty"),
    ],
)
def test_generate_rank_stops_at_impossible_decisions(change: dict[str, Any], message: str) -> None:
    """A rank whose state differs from the leader's never computes on."""
    worker = Script([7])
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 0, [3])))
    with pytest.raises(RankDesync, match=message):
        rank.apply(GenerateDecision(2, **change))
    assert len(worker.batches) == 1


def test_generate_rank_refuses_decisions_of_the_other_stage() -> None:
    """A log of the wrong group is a divergence, too."""
    rank = rank_of(Script())
    with pytest.raises(RankDesync, match="a generate rank heard a decision of an encode group"):
        rank.carry_out(EncodeDecision(1, []))


def test_generate_rank_goes_on_from_no_blocks_alone_if_there_is_a_state() -> None:
    """A rank that did would compute with a state that is not the sequence's."""
    cached = GenerateDecision(1, joined=[join(1, 0, [3, 4, 5, 6, 7], computed=4)])
    rank_of(Script([])).apply(cached)
    with pytest.raises(RankDesync, match="joins with the KV of 4 tokens, and state None"):
        rank_of(Script([]), keeps_state=True).apply(cached)


def test_generate_rank_refuses_an_adapter_that_is_not_here() -> None:
    rank = rank_of(Script([5]))
    rank.adapters.add(7)
    rank.apply(prefill(join(7, 0, [1, 2], adapter=7)))
    unknown = prefill(join(8, 1, [1, 2], adapter=8))
    with pytest.raises(RankDesync, match="adapter 8, which is not here"):
        rank.apply(unknown)


ITEM = ItemPlace(5, 10)
RUNS = ItemPlace(5, 12, b"", ((5, 9), (10, 14), (15, 19)))
"""Rows of four tokens with separators between them."""
PRUNED = ItemPlace(5, 12, b"", ((5, 8), (10, 13)), ((1, 3), (6, 9), (11, 12)))
"""Placeholders stand for the kept rows in order."""


@pytest.mark.parametrize(
    ("place", "span", "rows"),
    [
        # Of each run of placeholders in the chunk: first in the chunk, first row, past the last row.
        pytest.param(ITEM, (0, 20), [(5, 0, 10)], id="whole"),
        pytest.param(ITEM, (0, 9), [(5, 0, 4)], id="its beginning"),
        pytest.param(ITEM, (9, 12), [(0, 4, 7)], id="its middle"),
        pytest.param(ITEM, (12, 20), [(0, 7, 10)], id="its end"),
        pytest.param(RUNS, (0, 20), [(5, 0, 4), (10, 4, 8), (15, 8, 12)], id="runs, whole"),
        pytest.param(RUNS, (7, 12), [(0, 2, 4), (3, 4, 6)], id="runs, cut on both sides"),
        pytest.param(RUNS, (9, 15), [(1, 4, 8)], id="separators and the row between them"),
        pytest.param(RUNS, (9, 10), [], id="a separator alone"),
        pytest.param(RUNS, (18, 20), [(0, 11, 12)], id="the last placeholder"),
        pytest.param(
            PRUNED, (0, 20), [(5, 1, 3), (7, 6, 7), (10, 7, 9), (12, 11, 12)], id="pruned, whole"
        ),
        pytest.param(PRUNED, (6, 8), [(0, 2, 3), (1, 6, 7)], id="pruned, cut on both sides"),
        pytest.param(PRUNED, (8, 12), [(2, 7, 9)], id="a run of rows that a separator cuts"),
        pytest.param(PRUNED, (12, 20), [(0, 11, 12)], id="pruned, the last row"),
    ],
)
def test_generate_rank_item_rows_of_a_chunk(
    place: ItemPlace, span: tuple[int, int], rows: list[tuple[int, int, int]]
) -> None:
    """A chunk boundary inside an image splits its rows without gap or overlap; separators get none."""
    worker = Script([7] if span[1] == 20 else [])
    joining = join(1, 0, [5] * 20, items=[ItemPlace(0, 4), place])
    plan = ChunkPlan(0, *span, [ChunkItem(5, place.tokens, [3, 1, 2])])
    rank_of(worker).apply(GenerateDecision(1, joined=[joining], chunks=[plan]))
    [[items]] = [batch["items"] for batch in worker.batches]
    assert [(one.chunk_start, one.row_start, one.row_stop) for one in items] == rows
    assert all(one.index == 1 and one.pages == [3, 1, 2] for one in items)


def test_generate_rank_names_the_rows_that_need_more_than_argmax() -> None:
    """Rows and outputs of the sequences that sample; plain greedy ones are not among them."""
    worker = Script([7, 8, 9], [1, 2, 3])
    rank = rank_of(worker)
    hot = SamplingParams(temperature=1.0, max_tokens=50)
    hot_ones = join(1, 2, [1], sampling=hot), join(3, 1, [3], sampling=hot)
    rank.apply(prefill(hot_ones[0], join(2, 0, [2]), hot_ones[1]))
    assert worker.batches[0]["special"] == [(0, 1, []), (2, 3, [])]
    worker.logprobs = [TokenLogprobs(1, -0.5, [(2, -0.5)])]
    result = rank.apply(GenerateDecision(2))
    assert worker.batches[1]["special"] == [(1, 3, [9]), (2, 1, [7])]
    assert result.logprobs == [SlotLogprob(1, -0.5, [(2, -0.5)])]


def test_generate_rank_reports_each_prompt_token_by_the_row_before_it() -> None:
    """Only prompt tokens: not the token after the prompt, nor tokens generated before a loss."""
    telling = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    worker = Script([], [], [9, 9])
    rank = rank_of(worker)
    known = join(1, 0, [1, 2, 3, 4, 5, 6, 7], sampling=telling, prompt_length=5)
    joins = [known, join(2, 1, [1, 2])]
    first = rank.apply(GenerateDecision(1, joined=joins, chunks=[ChunkPlan(0, 0, 3, [])]))
    second = rank.apply(GenerateDecision(2, chunks=[ChunkPlan(0, 3, 6, [])]))
    third = rank.apply(GenerateDecision(3, chunks=[ChunkPlan(0, 6, 7, []), whole(1, 2)]))
    assert [one["told"] for one in worker.batches] == [[3], [1], [0, 0]]
    pieces = [
        [(one.number, one.start, len(one.ranks) // 4) for one in result.prompts]
        for result in (first, second, third)
    ]
    assert pieces == [[(1, 1, 3)], [(1, 4, 1)], []]


DOWN = msgspec.structs.replace(GREEDY, grammar='{"choice": ["20 19 18 17"]}')
"""Only the token below the last one is allowed; complete at 17."""


def test_generate_rank_masks_the_first_token_and_each_that_follows() -> None:
    worker = Script([7, 20], [7, 19], [7, 18])
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 0, [1, 2]), join(2, 1, [1, 2], sampling=DOWN)))
    rank.apply(GenerateDecision(2))
    rank.apply(GenerateDecision(3))
    assert [one["masks"] for one in worker.batches] == [{1: [20]}, {1: [19]}, {1: [18]}]


class Watched(ChoiceMatcher):
    """Counts reads of its mask since its last token."""

    reads = 0

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        reason = super().follow(token_ids)
        self.reads = 0
        return reason

    def __getattribute__(self, name: str) -> Any:
        if name == "mask":
            self.reads += 1
        return super().__getattribute__(name)


def test_generate_rank_reads_masks_once_its_result_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next decision arrives meanwhile; masks of ended rows are not read."""
    monkeypatch.setattr("vsched.sim.ranks.symbolic_model.ChoiceMatcher", Watched)
    worker = Script([20, 20], [19, 19], [18])
    rank = rank_of(worker)
    limited = msgspec.structs.replace(DOWN, max_tokens=2)

    def reads() -> list[int]:
        return [one.matcher.reads for one in worker.sequences if isinstance(one.matcher, Watched)]

    rank.apply(prefill(join(1, 0, [1], sampling=DOWN), join(2, 1, [1], sampling=limited)))
    assert reads() == [0, 0]
    rank.look_ahead()
    assert reads() == [1, 1]
    rank.apply(GenerateDecision(2))
    rank.look_ahead()
    assert reads() == [1, 0]
    rank.apply(GenerateDecision(3))
    masks = [one["masks"] for one in worker.batches]
    assert masks == [{0: [20], 1: [20]}, {0: [19], 1: [19]}, {0: [18]}]


@pytest.mark.parametrize(
    ("max_tokens", "sampled", "reason"),
    [
        pytest.param(4, [20, 19, 18, 17], STOP, id="whole, even at the limit"),
        pytest.param(1, [20], LENGTH, id="cut at the limit"),
        pytest.param(9, [20, 25], FinishReason.ERROR, id="what it cannot follow"),
    ],
)
def test_generate_rank_ends_an_output_with_a_grammar(
    max_tokens: int, sampled: list[int], reason: FinishReason
) -> None:
    """Without a stop token, and alone; a step ahead, it yields nothing more."""
    worker = Script(*([7, token] for token in sampled), [8])
    rank = rank_of(worker)
    limited = msgspec.structs.replace(DOWN, max_tokens=max_tokens)
    first = prefill(join(1, 0, [1]), join(2, 1, [1], sampling=limited))
    rest = [GenerateDecision(step) for step in range(2, len(sampled) + 2)]
    results = [rank.apply(decision) for decision in (first, *rest)]
    ends = [one.finished for one in results]
    assert ends == [[]] * (len(sampled) - 1) + [[Finished(1, 2, reason)], []]
    assert worker.batches[-1]["slots"] == [0]


def test_generate_rank_without_grammars_follows_no_request_that_has_one() -> None:
    with pytest.raises(RankDesync, match="has a grammar"):
        rank_of(Script(), grammars=None).apply(prefill(join(1, 0, [1], sampling=DOWN)))
