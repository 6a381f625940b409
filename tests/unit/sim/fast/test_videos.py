"""Videos in the fast simulator: preparation, cache and limits; and gaps of decoding requests next to long videos."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from tests.unit.sim.fast.test_run import Seen, run, with_host
from tests.unit.sim.shapes import TINY, arrival, config
from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost, HostCost
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Text, Video, workload_of

CPU = CostModel(
    name="cpu",
    source="about those of a model of 400 million parameters on two cores",
    encode=EncodeCost(step_ns=2e7, item_ns=1e6, token_ns=3e6),
    generate=GenerateCost(step_ns=3e7, decode_ns=1e6, context_ns=100, prefill_ns=1.2e6, pair_ns=50),
    bytes_per_token=2352,
    shape=msgspec.structs.replace(TINY, context_tokens=32768),
    kv_tokens=131_072,
    noise=0.05,
)


def test_a_video_is_prepared_by_one_thread_and_encoded_group_by_group() -> None:
    host = HostCost(image_ns=4_000_000)
    video = Video("a", 5, 50)
    workload = workload_of("one", [arrival(1, 0, video, Text(1, 50), outputs=1)])
    outcome, seen = run(workload, cost=with_host(host))
    prepared_ns, encoded_ns = 5 * 4_000_000, 5 * (2_000_000 + 4000 * 50)
    step_ns = 2_000_000 + 300 * 10_000 + 10 * 300 * 150
    assert seen.ttft_ns("r1") <= prepared_ns + encoded_ns + step_ns
    assert seen.ttft_ns("r1") > prepared_ns + encoded_ns
    assert outcome.figures.images_encoded == 5


def test_each_frame_group_is_encoded_once() -> None:
    """A video again, and extended by two groups, in the next turns of a conversation."""
    videos = (Video("a", 5, 20), Video("a", 5, 20), Video("a", 7, 20), Video("b", 2, 20))
    turns = [
        arrival(number, 0, video, Text(number, 9), conversation="c", outputs=2)
        for number, video in enumerate(videos)
    ]
    outcome, _ = run(workload_of("turns", turns))
    assert outcome.figures.images == 19
    assert outcome.figures.images_encoded == 9


@pytest.mark.parametrize(
    ("videos", "code"), [(3, None), (4, "too_many_images"), (5, "too_many_videos")]
)
def test_limits_of_images_and_videos_count_videos(videos: int, code: str | None) -> None:
    prompt = [Video(f"{number}", 3, 4) for number in range(videos)]
    workload = workload_of("one", [arrival(1, 0, *prompt, Text(1, 5))])
    outcome, _ = run(workload, "media.images_max=3")
    assert outcome.figures.failed == ({code: 1} if code else {})


def test_decoding_goes_on_next_to_long_videos_for_an_hour() -> None:
    """31 requests decode in the processes that encode and prefill a video of 256 frames every four minutes."""
    texts = [
        arrival(100 * client + turn, 0, outputs=1000, conversation=f"c{client}")
        for client in range(31)
        for turn in range(54)
    ]
    videos = [
        arrival(10_000 + number, 240e3 * number, Video(f"{number}", 128, 64), Text(number, 20))
        for number in range(15)
    ]
    seen = Seen()
    outcome = simulate(
        config(
            "placement=together",
            "generate.slots=32",
            "generate.step_target_ratio=1.5",
            "arena.pixel_bytes=100000000",
        ),
        workload_of("an hour", [*texts, *videos]),
        cost=CPU,
        observers=[seen],
    )
    assert outcome.figures.finished == len(texts) + len(videos)
    assert outcome.figures.images_encoded == 128 * len(videos)
    gaps = seen.gaps_ns()
    assert sum(gaps) > 3600e9
    assert max(gaps) <= 3 * statistics.median(gaps)
