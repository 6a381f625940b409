"""Generated workloads: the same for the same seed, with the configured rates and shapes."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from random import Random

import pytest

from tests.unit.sim.shapes import TINY, arrival
from vsched.errors import ConfigError
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
    Image,
    Reply,
    RequestMaker,
    Text,
    Video,
    text_tokens,
)


@pytest.mark.parametrize("name", GENERATORS)
def test_generator_is_a_function_of_its_seed(name: str) -> None:
    one, same, other = (
        list(generate_workload(name, seed=seed, requests=50, rate=3.0)) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert len(one) == 50
    assert len({arrival.request_id for arrival in one}) == 50
    times = [arrival.at_ns for arrival in one]
    assert times == sorted(times)


def test_generator_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown. Known: poisson, gamma"):
        generate_workload("nope", seed=0, requests=1, rate=1.0)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="--rate: no rate of requests: value "):
            generate_workload("gamma", seed=0, requests=1, rate=rate)


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


def test_conversations_repeat_what_was_said() -> None:
    arrivals = list(conversations(seed=3, requests=120, rate=5.0, turns=4))
    turns = [one for one in arrivals if one.conversation == "c0"]
    assert [len(one.images) for one in turns] == [1, 2, 3, 4]
    for before, after in pairwise(turns):
        said = (*before.prompt, Reply(before.output_tokens))
        assert after.prompt[: len(said)] == said
        assert after.at_ns == before.at_ns + after.think_ns


def test_bursts_come_at_once() -> None:
    arrivals = list(bursts(seed=0, requests=200, rate=2.0, size=10))
    with_images = [one for one in arrivals if one.images]
    assert 0.3 < len(with_images) / 200 < 0.7
    assert len({one.at_ns for one in with_images[:10]}) == 1


def test_shared_prefixes_are_shared() -> None:
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


# --- generated requests ---


def maker(item_tokens_max: int = 100) -> RequestMaker:
    return RequestMaker(TINY, bytes_per_token=192, item_tokens_max=item_tokens_max)


def test_equal_texts_are_equal_tokens_and_others_differ_in_every_block() -> None:
    """Of two texts with one number the shorter begins the longer; with two, they differ at once."""
    assert text_tokens(Text(5, 3)) == text_tokens(Text(5, 30))[:3]
    assert len(text_tokens(Text(5, 1))) == 1
    for one, other in [(5, 6), (5, 5 + (1 << 30)), (0, 1 << 59)]:
        assert text_tokens(Text(one, 16))[:2] != text_tokens(Text(other, 16))[:2]
    assert max(text_tokens(Text((1 << 60) - 1, 40))) < 1 << 31


def test_request_of_an_arrival() -> None:
    made = maker().request(
        arrival(1, 0, Text(1, 3), Image("a", 5), Reply(2), Image("b", 200), outputs=9, priority=4)
    )
    first, second = made.items
    assert (first.offset, first.tokens, second.offset, second.tokens) == (3, 5, 10, 100)
    assert made.prompt_token_ids[3:8] == [TINY.image_token_id] * 5
    assert made.prompt_token_ids[8:10] == [OUTPUT_TOKEN] * 2
    assert len(made.prompt_token_ids) == 110
    assert made.sampling.max_tokens == 9
    assert made.priority == 4
    assert first.extent is not None
    assert first.extent.size == 5 * 192


def test_a_video_begins_as_a_longer_one_does() -> None:
    short, long = (
        maker().request(arrival(number, 0, Text(1, 3), Video("a", groups, 5), Text(1, 1)))
        for number, groups in enumerate((2, 4))
    )
    assert [item.key for item in short.items] == [item.key for item in long.items[:2]]
    assert len({item.key for item in long.items}) == 4
    assert [item.offset for item in long.items] == [3, 8, 13, 18]
    assert len(long.prompt_token_ids) == 3 + 20 + 1


def test_images_are_equal_by_key_within_a_tenant() -> None:
    one, same, other = (
        maker().request(arrival(number, 0, Image("a", 5), Text(1, 1), tenant=tenant)).items[0].key
        for number, tenant in enumerate(("", "", "x"))
    )
    assert one == same != other


def test_images_larger_than_the_limit_are_counted() -> None:
    made = maker(item_tokens_max=64)
    made.request(arrival(1, 0, Image("a", 64), Image("b", 65), Text(1, 1)))
    assert made.scaled_down == 1
