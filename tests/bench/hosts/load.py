"""Requests about new images, with their timing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.e2e.asking import data_url, drawn_image
from vsched import Engine, SamplingParams

_numbers = itertools.count()


@dataclass
class Asked:
    """Results of some requests.

    Attributes:
        seconds: From the first request to the end of the last.
        ttft_ms: Time to first token of each.
        tokens: Output tokens by picture number.
    """

    seconds: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def images_s(self) -> float:
        """Images per second."""
        return len(self.ttft_ms) / self.seconds


class Pictures:
    """Pictures as data URLs, drawn before any measurement; equal numbers give equal pictures."""

    def __init__(self, count: int, side: int) -> None:
        self._urls = [data_url(drawn_image(seed, (side, side))) for seed in range(count)]

    async def ask(
        self, engine: Engine, numbers: Sequence[int], *, at_once: int, tokens: int
    ) -> Asked:
        """Send a request about each of these pictures, `at_once` at a time."""
        requested = Asked()
        content = [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": "?"}]
        prompt = engine.preprocessor.render([{"role": "user", "content": content}])
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        waiting = list(reversed(numbers))

        async def client() -> None:
            while waiting:
                number = waiting.pop()
                began_s = time.perf_counter()
                stream = await engine.generate(
                    prompt=prompt,
                    images=[self._urls[number]],
                    sampling=sampling,
                    request_id=f"ask-{next(_numbers)}",
                )
                answer: list[int] = []
                async for delta in stream:
                    if not answer:
                        requested.ttft_ms.append(1e3 * (time.perf_counter() - began_s))
                    answer += delta.token_ids
                requested.tokens[number] = answer

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(client())
        requested.seconds = time.perf_counter() - began_s
        return requested
