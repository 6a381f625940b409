"""Workloads of the gallery cases: without arguments, so that they are the same on every machine.

Tenants only serve to show figures separately: texts and images, chats and long documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import msgspec

from vsched.sim.workload.generators import poisson
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload, workload_of

SECOND_NS = 1_000_000_000


def _arrivals(
    tenant: str, times: Iterable[float], sizes: Callable[[Random, int], tuple[int, int, int]]
) -> Iterator[Arrival]:
    """Yield arrivals at times in seconds; `sizes` draws prompt, image and output tokens."""
    rng = Random(tenant)  # noqa: S311 - a workload that is the same every time
    for number, at_s in enumerate(times):
        text, image, outputs = sizes(rng, number)
        name = f"{tenant}-{number}"
        images = (Image(name, image),) if image else ()
        yield _arrival(tenant, name, at_s, (*images, Text(_content(tenant, number), text)), outputs)


def _arrival(
    tenant: str, name: str, at_s: float, prompt: tuple[PromptPart, ...], outputs: int
) -> Arrival:
    return Arrival(
        at_ns=int(at_s * SECOND_NS),
        request_id=name,
        prompt=prompt,
        output_tokens=outputs,
        tenant=tenant,
    )


def _content(tenant: str, number: int) -> int:
    """Return the number of a text that no other request sends."""
    return (1 << 42) + (sum(ord(letter) for letter in tenant) << 20 | number)


def _poisson(seed: str, rate: float, until_s: float) -> Iterator[float]:
    rng, gap, at_s = Random(seed), poisson(rate), 0.0  # noqa: S311 - a seeded workload
    while (at_s := at_s + gap(rng)) < until_s:
        yield at_s


def _conversations(
    tenant: str, *, rate: float, until_s: float, turns: int, every_s: float, image: int
) -> Iterator[Arrival]:
    """Yield conversations whose turns repeat all earlier ones, starting with an image if `image` is not 0 tokens."""
    rng = Random(tenant)  # noqa: S311 - a seeded workload
    for number, start_s in enumerate(_poisson(tenant, rate, until_s)):
        prompt: tuple[PromptPart, ...] = (Image(f"{tenant}-{number}", image),) if image else ()
        at_s = start_s
        for turn in range(turns):
            prompt = (*prompt, Text(_content(tenant, number * turns + turn), rng.randint(200, 600)))
            name = f"{tenant}-{number}-{turn}"
            yield _arrival(tenant, name, at_s, prompt, rng.randint(40, 120))
            at_s += every_s * rng.uniform(0.5, 1.5)


def image_burst() -> Workload:
    """Chats for half a minute, and 40 requests with a large image at 10 s."""
    texts = _arrivals(
        "texts", _poisson("texts", 8.0, 30.0), lambda rng, _: (300, 0, rng.randint(60, 180))
    )
    images = _arrivals("images", [10.0] * 40, lambda rng, _: (50, 2500, rng.randint(40, 120)))
    return workload_of("a burst of images", [*texts, *images])


def long_context() -> Workload:
    """Chats for 40 s next to a tenant that sends about 12,000 tokens every second."""
    chats = _arrivals(
        "chat",
        _poisson("chat", 5.0, 40.0),
        lambda rng, _: (rng.randint(100, 500), 0, rng.randint(60, 180)),
    )
    long = _arrivals(
        "long", _poisson("long", 1.2, 40.0), lambda rng, _: (rng.randint(9000, 15000), 0, 60)
    )
    return workload_of("a long-context tenant", [*chats, *long])


def overload() -> Workload:
    """Twice the sustainable load for 30 s; a third is urgent, with a TTFT target of 1 s."""

    def urgent(arrival: Arrival) -> Arrival:
        return msgspec.structs.replace(arrival, priority=5, ttft_target_ms=1000)

    hurried = _arrivals("urgent", _poisson("urgent", 7.0, 30.0), _overload_sizes)
    batch = _arrivals("batch", _poisson("batch", 14.0, 30.0), _overload_sizes)
    return workload_of("an overload of 2x", [*map(urgent, hurried), *batch])


def _overload_sizes(rng: Random, _: int) -> tuple[int, int, int]:
    return rng.randint(200, 1400), 0, rng.randint(80, 240)


def conversations() -> Workload:
    """Conversations of six turns for a minute; half of them begin with an image."""
    texts = _conversations("texts", rate=3.0, until_s=40.0, turns=6, every_s=8.0, image=0)
    images = _conversations("images", rate=3.0, until_s=40.0, turns=6, every_s=8.0, image=1600)
    return workload_of("conversations", [*texts, *images])


def scan() -> Workload:
    """Conversations next to a tenant whose long documents are never repeated."""
    chats = _conversations("chat", rate=0.8, until_s=60.0, turns=6, every_s=8.0, image=0)
    scanned = _arrivals(
        "scan", _poisson("scan", 1.0, 80.0), lambda rng, _: (rng.randint(3000, 6000), 0, 20)
    )
    return workload_of("a scan next to conversations", [*chats, *scanned])


def long_answers() -> Workload:
    """Requests whose outputs outgrow the KV cache: some with long prompts, others with long outputs."""
    talks = _arrivals(
        "talks", _poisson("talks", 3.0, 40.0), lambda rng, _: (200, 0, rng.randint(400, 1000))
    )
    documents = _arrivals(
        "documents",
        _poisson("documents", 1.5, 40.0),
        lambda rng, _: (rng.randint(3000, 5000), 0, rng.randint(100, 300)),
    )
    return workload_of("answers that outgrow the KV cache", [*talks, *documents])


def albums() -> Workload:
    """Albums of eight large images next to single small ones."""

    def album(number: int, at_s: float) -> Arrival:
        shown = [
            part
            for index in range(8)
            for part in (
                Image(f"album-{number}-{index}", 2000),
                Text(_content("albums", number * 8 + index), 40),
            )
        ]
        return _arrival("albums", f"album-{number}", at_s, tuple(shown), 80)

    albums = [album(number, at_s) for number, at_s in enumerate(_poisson("albums", 0.9, 40.0))]
    single = _arrivals("single", _poisson("single", 6.0, 40.0), lambda rng, _: (60, 200, 60))
    return workload_of("albums and single images", [*albums, *single])
