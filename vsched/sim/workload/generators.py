"""Workloads generated from a seed: several arrival processes, and shapes that are hard for some policies.

Every generator depends on its arguments alone: the same seed gives the same workload in every
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from random import Random

from vsched.errors import ConfigError
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Reply, Text, Video, Workload

SECOND_NS = 1_000_000_000
Gaps = Callable[[Random], float]
"""Draws the seconds between two arrivals."""
LENGTHS_SPREAD = 0.8
OWN_TEXTS = 1 << 41
"""Texts that occur once are numbered from here."""


def poisson(rate: float) -> Gaps:
    """Return gaps of a Poisson process with `rate` arrivals per second."""
    return lambda rng: rng.expovariate(rate)


def gamma(rate: float, *, cv: float = 2.0) -> Gaps:
    """Return gamma-distributed gaps; with a coefficient of variation above 1, arrivals come in bursts."""
    shape = 1 / cv**2
    return lambda rng: rng.gammavariate(shape, 1 / (rate * shape))


def weibull(rate: float, *, shape: float = 0.6) -> Gaps:
    """Return Weibull-distributed gaps, long-tailed for a `shape` below 1: bursts with quiet times between them."""
    scale = 1 / (rate * math.gamma(1 + 1 / shape))
    return lambda rng: rng.weibullvariate(scale, shape)


def _lengths(rng: Random, mean: float) -> int:
    """Draw a lognormal length: most below the mean and a few far above, like lengths of texts."""
    return max(round(rng.lognormvariate(math.log(mean) - LENGTHS_SPREAD**2 / 2, LENGTHS_SPREAD)), 1)


def _times(gaps: Gaps, rng: Random, requests: int) -> Iterator[int]:
    at_s = 0.0
    for _ in range(requests):
        at_s += gaps(rng)
        yield int(at_s * SECOND_NS)


Prompt = Callable[[Random, int], tuple[PromptPart, ...]]
"""Creates the prompt of the request with a number."""


def independent(
    name: str,
    *,
    seed: int,
    requests: int,
    gaps: Gaps,
    prompt: Prompt,
    output_tokens: float = 200,
) -> Workload:
    """Return a workload of requests without conversations."""

    def arrivals() -> Iterator[Arrival]:
        rng = Random(f"{name} {seed}")  # noqa: S311 - a seeded workload
        times = Random(f"{name} times {seed}")  # noqa: S311 - a seeded workload
        for number, at_ns in enumerate(_times(gaps, times, requests)):
            yield _arrival(at_ns, number, prompt(rng, number), _lengths(rng, output_tokens))

    return Workload(name, arrivals, requests)


def _arrival(
    at_ns: int, number: int, prompt: tuple[PromptPart, ...], output_tokens: int
) -> Arrival:
    return Arrival(at_ns=at_ns, request_id=f"r{number}", prompt=prompt, output_tokens=output_tokens)


def _text(number: int, tokens: int) -> Text:
    return Text(OWN_TEXTS + number, tokens)


def _mixed_prompt(rng: Random, number: int) -> tuple[PromptPart, ...]:
    """Create a prompt of a unique text and mostly few images."""
    count = rng.choice((0, 1, 1, 1, 1, 2, 2, 4))
    images = [Image(f"r{number}/{index}", rng.randint(64, 1280)) for index in range(count)]
    return (*images, _text(number, _lengths(rng, 300)))


def mixed(kind: str, *, seed: int, requests: int, rate: float) -> Workload:
    """Return requests with no, one or few images each; `kind` is the arrival process."""
    gaps = {"poisson": poisson, "gamma": gamma, "weibull": weibull}[kind](rate)
    return independent(kind, seed=seed, requests=requests, gaps=gaps, prompt=_mixed_prompt)


def thin_images(*, seed: int, requests: int, rate: float) -> Workload:
    """Return requests with many small images: the cost of encoding is in their number, not their size."""

    def prompt(rng: Random, number: int) -> tuple[PromptPart, ...]:
        count = rng.randint(8, 32)
        images = [Image(f"r{number}/{index}", rng.randint(4, 32)) for index in range(count)]
        return (_text(number, _lengths(rng, 100)), *images)

    return independent(
        "thin-images", seed=seed, requests=requests, gaps=poisson(rate), prompt=prompt
    )


VIDEO_LENGTHS_S = ((11, 120, 80.8), (240, 900, 520.2), (1800, 3600, 2471.0))
"""Shortest, longest and mean duration of the short, medium and long videos of Video-MME, 300 of each
(https://arxiv.org/abs/2405.21075)."""
VIDEO_FPS = 2
VIDEO_FRAMES_MAX = 256
VIDEO_TOKENS_MAX = 16_384
FRAME_TOKENS_MAX = 299
"""Tokens of a frame group of 640 x 360 pixels in Qwen2.5-VL."""


def video_seconds(rng: Random, least: float, most: float, mean: float) -> float:
    """Draw a duration from a triangular distribution with these bounds and this mean."""
    return rng.triangular(least, most, 3 * mean - least - most)


def draw_video(rng: Random, key: str) -> Video:
    """Draw a video with a duration like those of Video-MME; a longer one has smaller frames."""
    seconds = video_seconds(rng, *rng.choice(VIDEO_LENGTHS_S))
    groups = min(int(seconds * VIDEO_FPS), VIDEO_FRAMES_MAX) // 2
    return Video(key, groups, min(FRAME_TOKENS_MAX, VIDEO_TOKENS_MAX // groups))


def videos(*, seed: int, requests: int, rate: float) -> Workload:
    """Return texts, and in one of eight requests a video of up to 256 frames."""

    def prompt(rng: Random, number: int) -> tuple[PromptPart, ...]:
        text = _text(number, _lengths(rng, 300))
        return (draw_video(rng, f"r{number}"), text) if rng.random() < 1 / 8 else (text,)

    return independent("videos", seed=seed, requests=requests, gaps=poisson(rate), prompt=prompt)


def shared_prefixes(*, seed: int, requests: int, rate: float) -> Workload:
    """Return requests with one of 16 system prompts and one of 64 images, of which some are far more frequent."""

    def prompt(rng: Random, number: int) -> tuple[PromptPart, ...]:
        # A Pareto draw: the first one is in about a third of the requests.
        prefix = min(int(rng.paretovariate(0.6)), 16)
        image = min(int(rng.paretovariate(0.6)), 64)
        return (
            Text(prefix, 200 + 100 * (prefix % 12)),
            Image(f"shared/{image}", 128 + 64 * (image % 16)),
            _text(number, _lengths(rng, 100)),
        )

    return independent(
        "shared-prefixes", seed=seed, requests=requests, gaps=poisson(rate), prompt=prompt
    )


def bursts(*, seed: int, requests: int, rate: float, size: int = 12) -> Workload:
    """Return texts with short outputs, and sometimes `size` simultaneous requests with the largest possible image.

    Half of the requests are in bursts. An image with more tokens than the server allows is scaled
    down to its limit.
    """

    def arrivals() -> Iterator[Arrival]:
        rng = Random(f"bursts {seed}")  # noqa: S311 - a seeded workload
        gap, at_s, number = poisson(rate / 2), 0.0, 0
        burst_s = 2 * size / rate
        next_burst_s = burst_s
        while number < requests:
            at_s += gap(rng)
            while at_s >= next_burst_s:
                for _ in range(size):
                    image = Image(f"r{number}/0", 16384)
                    prompt = (image, _text(number, _lengths(rng, 50)))
                    at_ns = int(next_burst_s * SECOND_NS)
                    yield _arrival(at_ns, number, prompt, _lengths(rng, 100))
                    number += 1
                    if number == requests:
                        return
                next_burst_s += burst_s
            text = _text(number, _lengths(rng, 200))
            yield _arrival(int(at_s * SECOND_NS), number, (text,), _lengths(rng, 200))
            number += 1

    return Workload("bursts", arrivals, requests)


def conversations(*, seed: int, requests: int, rate: float, turns: int = 6) -> Workload:
    """Return conversations with an image in each turn: turn k holds k images and all earlier text.

    `rate` is requests per second. A turn is sent about 20 s after the response to the previous
    one.
    """

    def arrivals() -> Iterator[Arrival]:
        rng = Random(f"conversations {seed}")  # noqa: S311 - a seeded workload
        gap = poisson(rate / turns)
        waiting: list[tuple[int, int, Iterator[Arrival], Arrival]] = []
        at_s, number, yielded = gap(rng), 0, 0
        while yielded < requests:
            # Conversations start as time passes; the earliest turn of all open ones is next.
            while not waiting or waiting[0][0] >= int(at_s * SECOND_NS):
                turns_of_it = _turns(rng.randrange(1 << 62), number, int(at_s * SECOND_NS))
                first = next(turns_of_it)
                heappush(waiting, (first.at_ns, number, turns_of_it, first))
                number += 1
                at_s += gap(rng)
            _, one, rest, arrival = heappop(waiting)
            yield arrival
            yielded += 1
            following = next(rest, None)
            if following is not None:
                heappush(waiting, (following.at_ns, one, rest, following))

    def _turns(own_seed: int, number: int, at_ns: int) -> Iterator[Arrival]:
        rng = Random(own_seed)  # noqa: S311 - a seeded workload
        said: tuple[PromptPart, ...] = (Text(0, 60),)  # a system prompt, the same for all
        for turn in range(turns):
            text = _text((number << 8) + turn, _lengths(rng, 40))
            said = (*said, Image(f"c{number}/{turn}", 576), text)
            outputs = _lengths(rng, 120)
            think_ns = int(rng.uniform(0.5, 1.5) * 20 * SECOND_NS) if turn else 0
            at_ns += think_ns
            yield Arrival(
                at_ns=at_ns,
                request_id=f"c{number}-{turn}",
                prompt=said,
                output_tokens=outputs,
                conversation=f"c{number}",
                think_ns=think_ns,
            )
            said = (*said, Reply(outputs))

    return Workload("conversations", arrivals, requests)


GENERATORS: dict[str, Callable[..., Workload]] = {
    **{kind: partial(mixed, kind) for kind in ("poisson", "gamma", "weibull")},
    "conversations": conversations,
    "bursts": bursts,
    "thin-images": thin_images,
    "shared-prefixes": shared_prefixes,
    "videos": videos,
}
"""Generators by their names in `vsched simulate --workload`; each takes a seed, a number of requests, and a rate."""


def generate_workload(name: str, *, seed: int, requests: int, rate: float) -> Workload:
    """Return a generated workload by name.

    Raises:
        ConfigError: When there is no such generator, or the rate is not a number above 0.
    """
    if name not in GENERATORS:
        raise ConfigError(f"--workload {name}: unknown. Known: {', '.join(GENERATORS)}")
    if not 0 < rate < math.inf:
        raise ConfigError.of_limit(
            "--rate: no rate of requests",
            value=rate,
            limit="a number above 0",
            remedy="give requests per second",
        )
    return GENERATORS[name](seed=seed, requests=requests, rate=rate)
