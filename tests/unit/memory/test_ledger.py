"""The ledger: every byte once, the rest unclaimed, as a table and as a line."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory.views import attempted, memory_view, rank_memory, reserved
from tests.workers.properties import REPEATABLE
from vsched.memory import Ledger, LedgerLine, group_ledger, size_text
from vsched.policy import Attempt, RankMemory

POOLS = st.sampled_from(["a", "b", "c"])
LINES = st.builds(
    LedgerLine,
    pool=POOLS,
    owner=st.sampled_from(["x", "y"]),
    line=st.sampled_from(["weights", "kv", "arena"]),
    bytes=st.integers(0, 10**12),
)


@REPEATABLE
@given(totals=st.dictionaries(POOLS, st.integers(0, 10**12)), lines=st.lists(LINES))
def test_ledger_lines_add_up(totals: dict[str, int], lines: list[LedgerLine]) -> None:
    """In each pool the lines sum to its total, unclaimed included, whatever is claimed."""
    ledger = Ledger.balanced(totals, lines)
    assert set(ledger.totals) == {*totals, *(line.pool for line in lines)}
    for pool, total in ledger.totals.items():
        assert sum(line.bytes for line in ledger.of_pool(pool)) == total == totals.get(pool, total)
    assert [line for line in ledger.lines if line.line != "unclaimed"] == sorted(
        lines, key=lambda line: list(ledger.totals).index(line.pool)
    )


@st.composite
def measured(draw: st.DrawFn) -> RankMemory:
    total = 10**9
    reserved_bytes = draw(st.integers(0, total))
    return rank_memory(
        rank=draw(st.integers(0, 99)),
        pool=draw(POOLS),
        total_bytes=total,
        reserved_bytes=reserved_bytes,
        available_bytes=draw(st.integers(0, total - reserved_bytes)),
        weights_bytes=draw(st.integers(0, reserved_bytes)),
        peak_bytes=draw(st.integers(0, total)),
        kv_bytes=draw(st.integers(0, 10**8)),
    )


@REPEATABLE
@given(
    ranks=st.lists(measured(), min_size=1, max_size=3),
    encoders=st.lists(measured(), max_size=2),
    growth=st.lists(st.tuples(POOLS, st.integers(0, 10**8), st.booleans()), max_size=3),
    headroom_bytes=st.integers(0, 10**8),
    together=st.booleans(),
)
def test_group_ledger_adds_up(
    ranks: list[RankMemory],
    encoders: list[RankMemory],
    growth: list[tuple[str, int, bool]],
    headroom_bytes: int,
    together: bool,
) -> None:
    """No line but unclaimed is negative, and every reservation is listed, even one of 0 bytes."""
    attempt = Attempt(
        action="build",
        tokens=1,
        outcome="fits",
        message="",
        ranks=ranks,
        headroom_bytes=headroom_bytes,
    )
    reservations = [reserved(size, pool=pool, held=held) for pool, size, held in growth]
    ledger = group_ledger(
        memory_view(ranks=ranks, reservations=reservations),
        [attempt],
        encoders=encoders,
        together=together,
    )
    for pool, total in ledger.totals.items():
        assert sum(line.bytes for line in ledger.of_pool(pool)) == total
    assert all(line.bytes >= 0 for line in ledger.lines if line.line != "unclaimed")
    activations = [line for line in ledger.lines if line.line == "encoder activations"]
    assert sorted(line.bytes for line in activations) == sorted(size for _, size, _ in growth)


def lines_of(ledger: Ledger, pool: str = "device") -> dict[str, int]:
    return {f"{line.owner} {line.line}".strip(): line.bytes for line in ledger.of_pool(pool)}


def test_group_ledger_after_loading() -> None:
    assert lines_of(group_ledger(memory_view())) == {
        "generate rank 0 weights": 150_000,
        "generate rank 0 kv": 0,
        "generate rank 0 language activations": 50_000,
        "others peers": 100_000,
        "unclaimed": 700_000,
    }


def test_group_ledger_at_the_peak_of_a_build() -> None:
    """The headroom has a line of its own, and is not among the activations."""
    build = attempted("build", 40_000, peak_bytes=700_000, reserved_bytes=600_000)
    view = memory_view(reservations=[reserved(30_000)])
    build = msgspec.structs.replace(build, headroom_bytes=50_000)
    assert lines_of(group_ledger(view, [build])) == {
        "generate rank 0 weights": 150_000,
        "generate rank 0 kv": 400_000,
        "generate rank 0 language activations": 100_000,
        "generate rank 0 headroom": 50_000,
        "others peers": 120_000,
        "encode rank 0 encoder activations": 30_000,
        "unclaimed": 150_000,
    }


def test_group_ledger_has_a_line_for_states() -> None:
    """They are not among the activations; a model without has no such line."""
    build = attempted("build", 40_000, peak_bytes=700_000, state_bytes=60_000)
    lines = lines_of(group_ledger(memory_view(), [build]))
    assert lines["generate rank 0 state"] == 60_000
    assert lines["generate rank 0 language activations"] == 700_000 - 150_000 - 400_000 - 60_000


def test_group_ledger_counts_an_encoder_once() -> None:
    """Memory of an encoder in a process of its own is no longer counted among the peers."""
    view = memory_view(reservations=[reserved(30_000, held=True)])
    encoder = rank_memory(weights_bytes=45_000)
    apart = lines_of(group_ledger(view, encoders=[encoder]))
    assert apart["others peers"] == 25_000
    assert apart["encode rank 0 weights"] == 45_000
    assert apart["encode rank 0 encoder activations"] == 30_000
    assert apart["generate rank 0 language activations"] == 50_000
    together = lines_of(group_ledger(view, encoders=[encoder], together=True))
    assert together["others peers"] == 100_000
    assert "encode rank 0 weights" not in together
    assert together["generate rank 0 language activations"] == 20_000
    assert apart["unclaimed"] == together["unclaimed"] == 700_000


def test_group_ledger_counts_ranks_on_one_device_once() -> None:
    ranks = [rank_memory(rank=rank, available_bytes=500_000) for rank in range(2)]
    ledger = lines_of(group_ledger(memory_view(ranks=ranks)))
    assert ledger["others peers"] == 100_000
    assert ledger["generate rank 1 weights"] == 150_000
    assert ledger["unclaimed"] == 500_000


def test_ledger_shows_what_is_overdrawn() -> None:
    ledger = Ledger.balanced({"a": 10}, [LedgerLine("a", "x", "kv", 30)])
    assert ledger.unclaimed("a") == -20
    assert "unclaimed -20 bytes" in ledger.summary()


def test_ledger_refuses_headroom_of_others() -> None:
    with pytest.raises(AssertionError, match="unclaimed is the rest"):
        Ledger.balanced({"a": 10}, [LedgerLine("a", "x", "unclaimed", 30)])


def example() -> Ledger:
    gib = 1 << 30
    return Ledger.balanced(
        {"cuda:GPU-1": 80 * gib, "host": 4 * gib},
        [
            LedgerLine("cuda:GPU-1", "generate rank 0", "weights", 15 * gib),
            LedgerLine("cuda:GPU-1", "generate rank 0", "kv", 60 * gib),
            LedgerLine("cuda:GPU-1", "encode rank 0", "encoder activations", 0),
            LedgerLine("cuda:GPU-1", "others", "peers", 0),
            LedgerLine("host", "engine", "arena", gib // 2),
        ],
    )


def test_ledger_renders_a_table() -> None:
    assert example().render().splitlines() == [
        "pool and owner     line                      size   share",
        "cuda:GPU-1         total                80.00 GiB",
        "  generate rank 0  weights              15.00 GiB  18.8 %",
        "  generate rank 0  kv                   60.00 GiB  75.0 %",
        "  encode rank 0    encoder activations    0 bytes   0.0 %",
        "  others           peers                  0 bytes   0.0 %",
        "                   unclaimed             5.00 GiB   6.2 %",
        "host               total                 4.00 GiB",
        "  engine           arena                512.0 MiB  12.5 %",
        "                   unclaimed             3.50 GiB  87.5 %",
    ]


def test_ledger_has_a_one_line_summary() -> None:
    """Errors quote it: a reservation of 0 bytes is included, unclaimed memory is not."""
    assert example().summary() == (
        "cuda:GPU-1: 80.00 GiB = generate rank 0 weights 15.00 GiB + generate rank 0 kv 60.00 GiB + "
        "encode rank 0 encoder activations 0 bytes + unclaimed 5.00 GiB; "
        "host: 4.00 GiB = engine arena 512.0 MiB + unclaimed 3.50 GiB"
    )


def test_ledger_is_json() -> None:
    (device, host) = json.loads(json.dumps(example().as_dict()))["pools"]
    assert device["pool"] == "cuda:GPU-1"
    assert device["total"] == sum(line["bytes"] for line in device["lines"])
    assert host["lines"][0] == {"owner": "engine", "line": "arena", "bytes": 1 << 29}


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (-(3 << 29), "-1.50 GiB"),
    ],
)
def test_size_text(size: int, text: str) -> None:
    assert size_text(size) == text
