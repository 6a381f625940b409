"""Workloads: traces, whose format the first line tells and whose errors name the line, and generated ones."""

from __future__ import annotations

import gzip
import math
import statistics
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from tests.each_case import each_case
from tests.unit.sim.shapes import TINY, arrival
from vsched.errors import ConfigError
from vsched.kernel import SchedulerLimits
from vsched.sim.workload.generators import (
    GENERATORS,
    VIDEO_FRAMES_MAX,
    VIDEO_LENGTHS_S,
    VIDEO_TOKENS_MAX,
    bursts,
    conversations,
    gamma,
    generate_workload,
    poisson,
    shared_prefixes,
    video_seconds,
    videos,
    weibull,
)
from vsched.sim.workload.requests import (
    OUTPUT_TOKEN,
    Arrival,
    Image,
    Reply,
    RequestMaker,
    Text,
    Video,
    text_tokens,
    workload_of,
)
from vsched.sim.workload.traces import TraceError, load_trace, save_trace

SERVEGEN = "arrival_s,text_tokens,image_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
IMAGES = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"


@each_case(
    ("text", "arrivals"),
    [
        # ServeGen.
        (SERVEGEN + "0.5,179,1200|30,2\n1.7,20,,7\n", [(0, 1409, [1200, 30], 2), (1.2, 20, [], 7)]),
        # Azure 2023.
        (
            AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04,3,8\n",
            [(0, 4808, [], 10), (0.02004, 3, [], 8)],
        ),
        # Azure 2024.
        (
            AZURE + "2024-05-10 00:00:00.009930+00:00,10,1\n2024-05-10 00:00:01.009930+00:00,9,2\n",
            [(0, 10, [], 1), (1, 9, [], 2)],
        ),
        # Azure with images, which the context includes.
        (
            IMAGES + "2024-10-15 00:00:00,2,2000,5\n2024-10-15 00:00:01,3,40,5\n",
            [(0, 2000, [765, 765], 5), (1, 40, [13, 13, 13], 5)],
        ),
        # BurstGPT: a failure is left out.
        (
            BURST + "5,GPT,472,18,490,Conversation log\n45,GPT,1087,0,1087,API log\n60,GPT-4,9,2,11,API log\n",
            [(0, 472, [], 18), (55, 9, [], 2)],
        ),
    ],
)  # fmt: skip
def test_table_is_read_as_arrivals(
    tmp_path: Path, text: str, arrivals: list[tuple[float, int, list[int], int]]
) -> None:
    """Packed or not."""
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    for workload in (load_trace(write(tmp_path, text)), load_trace(packed)):
        expected = iter(arrivals)
        for one in workload:
            images = [each.tokens for each in one.images]
            at_s, *rest = next(expected)
            assert one.at_ns / 1e9 == pytest.approx(at_s, abs=1e-6)
            assert [one.prompt_tokens, images, one.output_tokens] == rest
        assert workload.requests == 2
        left_out = ("1 rows without output tokens were left out",) if text.startswith(BURST) else ()
        assert workload.notes == left_out


def test_trace_images_and_texts_occur_once(tmp_path: Path) -> None:
    path = write(tmp_path, SERVEGEN + "0,10,5|5,1\n0,10,5,1\n")
    first, second = load_trace(path)
    keys = [image.key for image in [*first.images, *second.images]]
    assert len(set(keys)) == 3
    assert first.prompt[-1] != second.prompt[-1]


def test_mooncake_trace_shares_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 27000, "input_length": 520, "output_length": 5, "hash_ids": [7, 3]}\n',
        "trace.jsonl",
    )
    first, second = load_trace(path)
    assert first.prompt == (Text(7, 512), Text(8, 512), Text(9, 76))
    assert second.prompt[0] == first.prompt[0]
    assert second.at_ns == 27_000_000_000


def test_bailian_trace_has_conversations_and_short_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 38, "output_length": 9, '
        '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 66.1, "input_length": 52, "output_length": 4, '
        '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 2001]}\n',
        "trace.jsonl",
    )
    first, second = load_trace(path)
    assert first.prompt == (Text(1089, 16), Text(1090, 16), Text(1091, 6))
    assert second.prompt[:3] == (Text(1089, 16), Text(1090, 16), Text(2001, 16))
    assert second.prompt_tokens == 52
    assert second.at_ns == 5_000_000_000
    assert first.conversation == second.conversation != ""


def test_own_trace_reads_as_it_was_written(tmp_path: Path) -> None:
    arrivals = [
        arrival(0, 0, Text(1, 5), Image("a", 7), conversation="c", tenant="t", priority=2),
        arrival(1, 5, Text(1, 5), adapter="sql"),
        arrival(2, 5, Text(1, 5), Image("a", 7), Reply(4), conversation="c", think_ns=9),
    ]
    path = tmp_path / "own.jsonl"
    save_trace(workload_of("own", arrivals), str(path))
    assert list(load_trace(path)) == arrivals


@each_case(
    ("text", "line", "what"),
    [
        (SERVEGEN + "0,1,1,1\n1,1,5|x,1\n", 3, "image_tokens is '5|x', not counts"),
        (SERVEGEN + "0,1,1,1\n\n1,many,1,1\n", 4, "text_tokens is 'many', not a number"),
        (SERVEGEN + "0,1,1,1.5\n", 2, "output_tokens is 1.5, not a count"),
        (SERVEGEN + "0,1,1\n", 2, "output_tokens is '', not a number"),
        (SERVEGEN + "0,1,1,inf\n", 2, "output_tokens is inf, not a count"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [1]}',
            1,
            "output_length",
        ),
        (SERVEGEN + "nan,1,1,1\n", 2, "arrival_s is nan, not a time"),
        (SERVEGEN + "2,1,1,1\n1.5,1,1,1\n", 3, "0.5 s before the row above; sort"),
        (AZURE + "yesterday,1,1\n", 2, "TIMESTAMP is 'yesterday', not a date and time"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}', 1, "make 5"),
        ('{"at_ns": 0, "request_id": "a", "prompt": [], "output_tokens": 0}', 1, "output_tokens"),
        ('{"at_ns": 0}\n', 1, "request_id"),
        ("one,two\n1,2\n", 1, "this header is of no known format: 'one,two'. Known: arrival_s"),
    ],
)
def test_trace_errors_name_line_and_cause(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as error:
        load_trace(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert what in str(error.value)


@each_case("kept", [0.2, 0.9])
def test_trace_that_was_not_downloaded_to_its_end(tmp_path: Path, kept: float) -> None:
    packed = gzip.compress(b"".join(b"%d,%d,,1\n" % (one, one * one) for one in range(2000)))
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(SERVEGEN.encode()) + packed[: int(len(packed) * kept)])
    with pytest.raises(TraceError, match=r"trace\.csv\.gz:\d+: .* ended before"):
        load_trace(path)
    with pytest.raises(TraceError, match="no requests"):
        load_trace(write(tmp_path, SERVEGEN))
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")


def test_workload_first_and_faster(tmp_path: Path) -> None:
    """With the pauses of its conversations."""
    path = write(tmp_path, SERVEGEN + "".join(f"{second},5,,1\n" for second in range(10)))
    workload = load_trace(path).first(3).faster(4)
    assert workload.requests == 3
    assert [one.at_ns for one in workload] == [0, 250_000_000, 500_000_000]
    assert len(list(workload)) == 3, "it can be gone through again"
    talk = workload_of("talk", [arrival(0, 8, Text(1, 5), conversation="c", think_ns=4000)])
    assert [(each.at_ns, each.think_ns) for each in talk.faster(4)] == [(2_000_000, 1000)]
    for factor in (0.0, math.nan):
        with pytest.raises(ConfigError, match="--speed: no speed-up: value "):
            workload.faster(factor)


def test_workload_of_has_values_of_the_declared_types(tmp_path: Path) -> None:
    """Workloads are drawn with numpy, whose numbers cannot be encoded in traces and digests."""
    odd = Arrival(
        at_ns=np.int64(7),  # type: ignore[arg-type]
        request_id=np.str_("r"),
        prompt=[Text(np.int64(1), np.int64(2)), Image(np.str_("cat"), 3)],  # type: ignore[arg-type]
        output_tokens=np.int32(4),  # type: ignore[arg-type]
    )
    save_trace(workload_of("own", [odd]), tmp_path / "own.jsonl")
    (kept,) = workload_of("own", [odd])
    assert list(load_trace(tmp_path / "own.jsonl")) == [msgspec.structs.replace(kept, at_ns=0)]
    plain = arrival(0, 0, Text(1, 2), Image("cat", 3))
    assert kept == msgspec.structs.replace(plain, at_ns=7, request_id="r")
    with pytest.raises(ConfigError, match=r"^arrivals\[0\].at_ns is not valid: value 1.5, limit"):
        workload_of("own", [msgspec.structs.replace(plain, at_ns=1.5)])


# --- generated workloads: the same for the same seed, with the configured rates and shapes ---


@each_case("name", GENERATORS)
def test_generator_is_a_function_of_its_seed(name: str) -> None:
    one, same, other = (
        list(generate_workload(name, seed=seed, requests=50, rate=3.0)) for seed in (1, 1, 2)
    )
    assert one == same != other
    assert len({arrival.request_id for arrival in one}) == len(one) == 50
    times = [arrival.at_ns for arrival in one]
    assert times == sorted(times)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="--rate: no rate of requests: value "):
            generate_workload(name, seed=0, requests=1, rate=rate)


@pytest.mark.parametrize(
    ("gaps", "variation"),
    [(poisson(5.0), 1.0), (gamma(5.0, cv=2.0), 2.0), (weibull(5.0, shape=0.6), 1.758)],
)
def test_gaps_have_their_rate_and_variation(gaps: object, variation: float) -> None:
    rng = Random(0)
    drawn = [gaps(rng) for _ in range(40_000)]  # type: ignore[operator]
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(0.2, rel=0.04)
    assert statistics.stdev(drawn) / mean == pytest.approx(variation, rel=0.06)


def test_conversations_repeat_earlier_turns() -> None:
    arrivals = list(conversations(seed=3, requests=120, rate=5.0, turns=4))
    turns = [one for one in arrivals if one.conversation == "c0"]
    assert [len(one.images) for one in turns] == [1, 2, 3, 4]
    for before, after in pairwise(turns):
        said = (*before.prompt, Reply(before.output_tokens))
        assert after.prompt[: len(said)] == said
        assert after.at_ns == before.at_ns + after.think_ns


def test_bursts_come_at_once_and_shared_prefixes_are_shared() -> None:
    arrivals = list(bursts(seed=0, requests=200, rate=2.0, size=10))
    with_images = [one for one in arrivals if one.images]
    assert 0.3 < len(with_images) / 200 < 0.7
    assert len({one.at_ns for one in with_images[:10]}) == 1
    arrivals = list(shared_prefixes(seed=0, requests=200, rate=1.0))
    assert len({one.prompt[0] for one in arrivals}) <= 16
    assert len({one.images[0].key for one in arrivals}) < 100
    assert len({one.prompt[2] for one in arrivals}) == 200


def test_videos_have_the_published_lengths() -> None:
    """Medium and long videos reach the maximum of frames."""
    shown = [one.prompt[0] for one in videos(seed=0, requests=8000, rate=1.0)]
    drawn = [part for part in shown if isinstance(part, Video)]
    assert 0.11 < len(drawn) / 8000 < 0.14
    cut = sum(video.groups == VIDEO_FRAMES_MAX // 2 for video in drawn)
    assert 0.6 < cut / len(drawn) < 0.72
    assert all(video.tokens <= VIDEO_TOKENS_MAX for video in drawn)
    rng = Random(1)
    for least, most, mean in VIDEO_LENGTHS_S:
        lengths = [video_seconds(rng, least, most, mean) for _ in range(4000)]
        assert least <= min(lengths) <= max(lengths) <= most
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.02)


def test_equal_texts_are_equal_tokens_and_others_differ_in_every_block() -> None:
    """Of two texts with one number the shorter begins the longer; with two, they differ at once."""
    assert text_tokens(Text(5, 3)) == text_tokens(Text(5, 30))[:3]
    assert len(text_tokens(Text(5, 1))) == 1
    for one, other in [(5, 6), (5, 5 + (1 << 30)), (0, 1 << 59)]:
        assert text_tokens(Text(one, 16))[:2] != text_tokens(Text(other, 16))[:2]
    assert max(text_tokens(Text((1 << 60) - 1, 40))) < 1 << 31


def test_request_of_an_arrival() -> None:
    """Oversized images are scaled down, `max_tokens` is limited to the context; image keys are per tenant."""
    prompt = (Text(1, 3), Image("a", 5), Reply(2), Image("b", 200), Image("c", 100))
    limits = SchedulerLimits(context_tokens=215, blocks=100, pages=8)
    making = RequestMaker(TINY, limits, bytes_per_token=192, item_tokens_max=100)
    made = making.request(arrival(1, 0, *prompt, outputs=9, priority=4))
    first, second, _ = made.items
    assert (first.offset, first.tokens, second.offset, second.tokens) == (3, 5, 10, 100)
    assert made.prompt_token_ids[3:8] == [TINY.image_token_id] * 5
    assert made.prompt_token_ids[8:10] == [OUTPUT_TOKEN] * 2
    assert len(made.prompt_token_ids) == 210
    assert (made.sampling.max_tokens, made.priority, making.scaled_down) == (5, 4, 1)
    assert first.extent is not None
    assert first.extent.size == 5 * 192
    same, other = (
        making.request(arrival(number, 0, *prompt, tenant=tenant)).items[0].key
        for number, tenant in enumerate(("", "x"))
    )
    assert first.key == same != other
