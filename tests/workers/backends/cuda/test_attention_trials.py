"""Choice of a kernel by trials: over a cache on the CPU, with kernels that are right, wrong or broken."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.workers.backends.paged import chunk_of, filled_cache, segment_of
from vsched.errors import DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda import attention, attention_trials
from vsched_workers.backends.cuda.attention import DirectFlashPrefill, FlashPrefill, KernelMissing
from vsched_workers.backends.cuda.attention_trials import (
    WITHIN,
    AttentionTrial,
    first_right,
    passes,
    try_kernels,
)
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.batching.kv_cache import KvCache, KvShape
from vsched_workers.batching.paged_attention import (
    PagedStep,
    ScoreRule,
    attend_by_rule,
    attend_with_kernels,
    decode_by_rule,
)


@dataclasses.dataclass(eq=False)
class Kernel:
    """A decode kernel with an error in its results, or in those by rules, or that raises."""

    wrong: float = 0.0
    wrong_by_rule: float = 0.0
    error: Exception | None = None
    takes_rules: bool = True

    def __call__(self, *inputs: Any) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return decode_by_gather(*inputs) + self.wrong

    def by_rule(self, query: Any, layer: int, step: PagedStep, rule: ScoreRule) -> torch.Tensor:
        index = step.context_index(rule.window, query.device)
        return decode_by_rule(query, step.cache.layers[layer], index, rule) + self.wrong_by_rule


def shaped_cache(*shapes: tuple[int, int, int]) -> KvCache:
    return KvCache(
        [KvShape(*shape) for shape in shapes],
        blocks=9,
        block_size=4,
        dtype=torch.float32,
        allocate=torch.zeros,
    )


def small_trial() -> AttentionTrial:
    return AttentionTrial.over(shaped_cache((2, 8, 8), (2, 8, 8)), 4)


def missing() -> Kernel:
    raise KernelMissing("not installed")


def choose(*kernels: Kernel) -> object:
    """Choose among these, after one that is not installed."""
    loaders: Sequence[Any] = [
        missing,
        *(functools.partial(lambda each: each, each) for each in kernels),
    ]
    with small_trial() as trial:
        return first_right("decode", loaders, decode_by_gather, trial.decode)


@pytest.mark.parametrize(
    "bad",
    [
        Kernel(wrong=0.5),
        Kernel(wrong=torch.nan),
        Kernel(error=RuntimeError("page_block_size must be a multiple of 256")),
    ],
    ids=["wrong", "no number", "broken"],
)
def test_first_kernel_that_is_right_is_used(bad: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    good = Kernel()
    assert choose(bad, good, Kernel()) is good
    assert choose(bad) is decode_by_gather
    assert "decode without Kernel, which is slower: " in caplog.text
    assert "attention by gather is used" in caplog.text


def test_trials_report_out_of_memory() -> None:
    """A cache that leaves no memory for its kernel is too large."""
    greedy = Kernel(error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(DeviceOutOfMemory, match="trying kernels"):
        choose(greedy, Kernel())


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_kernel_that_is_wrong_by_rules_decodes_plain_layers_alone(
    wrong: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(wrong_by_rule=wrong)
    monkeypatch.setattr(attention_trials, "_triton_decode", lambda _: kernel)
    cache = shaped_cache((2, 8, 8), (4, 24, 16))
    found: Any = try_kernels(WorkerSettings(), torch.float32, cache, 4, ruled=True).decode
    assert found is kernel
    assert found.takes_rules is (wrong == 0)
    assert ("decode by score rules without Kernel" in caplog.text) is (wrong > 0)


def test_steps_use_the_rules_of_a_kernel_for_decode_rows() -> None:
    """With chunks and without; a kernel that takes none is not called."""
    step = step_of([5, 17, 30])
    query = torch.randn(6, 3, 16, generator=torch.Generator().manual_seed(0))
    rule = ScoreRule(0.3, window=9, softcap=2.0)
    wanted = attend_by_rule(query, 1, step, rule)
    kernel: Any = Kernel()
    step.decode = kernel
    torch.testing.assert_close(attend_by_rule(query, 1, step, rule), wanted)
    kernel.wrong_by_rule = 1.0
    torch.testing.assert_close(attend_by_rule(query, 1, step, rule), wanted + 1)
    kernel.takes_rules = False
    torch.testing.assert_close(attend_by_rule(query, 1, step, rule), wanted)


def test_trial_leaves_the_cache_as_it_was() -> None:
    cache = shaped_cache((2, 8, 8), (2, 8, 8))
    with AttentionTrial.over(cache, 4) as trial:
        assert trial.decode(decode_by_gather).abs().sum() > 0
        assert trial.prefill(prefill_by_gather).shape == (4, 18, 8)
    assert not any(each.any() for each in (*cache.keys, *cache.values))


def varlen_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The documented behavior of torch's `varlen_attn`."""
    assert enable_gqa
    rows = []
    for one, (start, stop) in enumerate(itertools.pairwise(cu_seq_q)):
        span = slice(int(cu_seq_k[one]), int(cu_seq_k[one + 1]))
        keys, values = key[span], value[span]
        count = int(stop - start)
        assert count <= max_q
        assert len(keys) <= max_k
        group = query.shape[1] // key.shape[-2]
        keys, values = (held.repeat_interleave(group, dim=1) for held in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], keys) * scale
        before, after = window_size
        if after == 0:
            last = torch.arange(len(keys) - count, len(keys))[:, None]
            other = torch.arange(len(keys))
            unseen = other > last
            if before >= 0:
                unseen |= other < last - before
            scores = scores.masked_fill(unseen, -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(rows)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_on_cpu)


def operator_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *bounds: Any,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:
    """The operator behind it, which has a result of every kind, and knows grouped heads by their numbers."""
    assert not dropout_p
    assert is_causal == (window_size_left == -1)
    assert not return_debug_mask
    window = window_size_left, window_size_right
    found = varlen_on_cpu(
        query, key, value, *bounds, scale=scale, window_size=window, enable_gqa=True
    )
    return found, torch.empty(0), torch.empty(0)


def flash_prefills() -> list[FlashPrefill]:
    direct = DirectFlashPrefill()
    direct._forward = operator_on_cpu
    return [FlashPrefill(), direct]


def step_of(contexts: list[int]) -> PagedStep:
    return filled_cache(torch.float32, 2, 16, contexts=contexts, block_size=4)[1]


def with_chunks(step: PagedStep, *spans: tuple[int, int, int]) -> int:
    """Add chunks, each of a table from a first to a last position, after the decode rows; return the rows."""
    rows = step.decode_rows
    for index, first, last in spans:
        step.segments.append(segment_of(step, index, first, last - first, start=rows))
        rows = step.segments[-1].stop
    return rows


def counting(kernel: FlashPrefill) -> list[int]:
    """Return the numbers of keys that each call of a kernel reads."""
    attend, read = kernel._attend, list[int]()

    def noted(query: Any, key: Any, *given: Any, **options: Any) -> Any:
        read.append(len(key))
        return attend(query, key, *given, **options)

    kernel._attend = noted
    return read


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize(("first", "rows"), [(0, 9), (31, 6), (36, 1), (4, 33)])
def test_flash_prefill_equals_gather(first: int, rows: int) -> None:
    """A chunk at the end of its context: the causal mask is aligned to the last key."""
    step = step_of([1, 37])
    segment, own = chunk_of(step, 1, first, rows, heads=6, start=3)
    inputs = (*own, 1, segment, step, 0.3)
    for kernel in flash_prefills():
        found = kernel(*inputs)
        torch.testing.assert_close(found, prefill_by_gather(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("varlen")
def test_flash_prefill_takes_several_chunks_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a decode row; one after the other if contexts are too long to be gathered together."""
    step = step_of([7, 9, 37])
    step.decode_rows, step.contexts = 1, step.contexts[:1]
    rows = with_chunks(step, (1, 0, 9), (2, 30, 37))
    step.tables = step.tables[:1]
    own = torch.zeros(2, 2, rows, 16)
    for segment in step.segments:
        slots = segment.slots()[segment.first :]
        for mine, held in zip(own, (step.cache.keys, step.cache.values), strict=True):
            mine[:, segment.start : segment.stop] = held[1][slots].transpose(0, 1)
    query = torch.randn(6, rows, 16, generator=torch.Generator().manual_seed(1))
    wanted = attend_with_kernels(query, own[0], own[1], 1, step, 0.3)
    step.prefill = kernel = FlashPrefill()
    calls = counting(kernel)
    for limit, expected in ((1 << 20, 1), (0, 2)):
        monkeypatch.setattr(attention, "GATHERED_BYTES", limit)
        step.scratch.clear()
        calls.clear()
        found = attend_with_kernels(query, own[0], own[1], 1, step, 0.3)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert len(calls) == expected


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("window", [1, 6, 40])
def test_flash_prefill_in_a_window_reads_no_more_than_the_window(window: int) -> None:
    """A step with two chunks and a window equals torch's attention."""
    step = step_of([9, 37])
    step.decode_rows = 0
    rows = with_chunks(step, (0, 0, 9), (1, 30, 37))
    query = torch.randn(6, rows, 16, generator=torch.Generator().manual_seed(1))
    rule = ScoreRule(0.3, window)
    wanted = attend_by_rule(query, 1, step, rule)
    step.prefill = kernel = FlashPrefill()
    read = counting(kernel)
    torch.testing.assert_close(attend_by_rule(query, 1, step, rule), wanted, atol=1e-5, rtol=1e-5)
    assert read == [9, min(37, 7 + window - 1)]


def test_an_older_torch_has_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def older(query: Any, cu_seq_q: Any, *, scale: Any = None) -> None:
        """A signature without windows."""

    monkeypatch.setattr(varlen, "varlen_attn", older)
    with pytest.raises(KernelMissing, match="does not take window_size"):
        FlashPrefill()


@pytest.mark.parametrize(
    ("apart", "right"),
    [
        ([0.0, WITHIN[torch.float32]], True),
        ([0.0, 2 * WITHIN[torch.float32]], False),
        ([0.0, float("nan")], False),
        ([float("nan"), 0.0], False),
    ],
)
def test_each_run_of_a_trial_must_be_right(
    apart: list[float],
    right: bool,
    caplog: pytest.LogCaptureFixture,  # a parameter
) -> None:
    """The first launch is by Triton, the second without its dispatch."""
    left = list(apart)
    with caplog.at_level(logging.WARNING):
        found = passes(lambda: left.pop(0), torch.float32, without="no tower")
    assert found is right
    assert not left
    assert ("no tower, which is slower: results are wrong by" in caplog.text) is not right
