"""The same requests for several servers in turns: `python -m tests.bench.vllm_load URL... --load mixed --rounds 3`.

`burst` sends long prompts of one tenant, and then short ones of two others. `mixed` and `images` send requests at
random times, a third of them with long prompts; in `images`, a third of the short ones have a picture. The servers
write their times with `vllm.trace`; this prints times to first token as the client sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from vsched.bench.load.client import BenchClient, Sample, chat_body
from vsched.bench.load.generator import draw_image, draw_text

RATE, SECONDS = 4.0, 20.0


class Ask(NamedTuple):
    """A request, and the second at which it is sent."""

    at_s: float
    tenant: str
    words: int
    tokens: int
    pixels: int = 0

    def body(self, model: str, seed: str) -> bytes:
        """Return its body; another seed draws another text and picture."""
        rng = random.Random(seed)
        parts: list[dict[str, Any]] = [{"type": "text", "text": draw_text(rng, self.words)}]
        if self.pixels:
            url = draw_image(rng.getrandbits(32), self.pixels)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        extra = {"ignore_eos": True, "vllm_xargs": {"tenant": self.tenant}}
        return chat_body(model, [{"role": "user", "content": parts}], self.tokens, extra)


def burst() -> list[Ask]:
    """Return eight long prompts, then twelve short ones."""
    long = [Ask(0.01 * n, "heavy", 1000, 24) for n in range(8)]
    return long + [Ask(0.25 + 0.02 * n, f"light{n % 2}", 20 + n, 16) for n in range(12)]


def mixed(*, images: bool) -> list[Ask]:
    rng, at_s, found = random.Random(7), 0.0, list[Ask]()
    while (at_s := at_s + rng.expovariate(RATE)) < SECONDS:
        if rng.random() < 0.33:
            found.append(Ask(at_s, "heavy", rng.randrange(300, 1000), rng.randrange(8, 32)))
        else:
            pixels = 336 if images and rng.random() < 0.33 else 0
            tenant = f"light{rng.randrange(2)}"
            found.append(Ask(at_s, tenant, rng.randrange(10, 60), rng.randrange(4, 24), pixels))
    return found


async def send(url: str, asks: Sequence[Ask], seed: str) -> list[Sample]:
    """Send requests to one server, each at its time."""
    client = BenchClient(url)
    model = await client.model()
    bodies = [ask.body(model, f"{seed} {number}") for number, ask in enumerate(asks)]

    async def one(ask: Ask, body: bytes) -> Sample:
        await asyncio.sleep(ask.at_s)
        return await client.chat(body)

    return await asyncio.gather(*map(one, asks, bodies))


def main() -> None:
    """Send the load; print p50 and p95 of each round and tenant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--load", choices=["burst", "mixed", "images"], default="mixed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    asks = burst()
    if options.load != "burst":
        asks = mixed(images=options.load == "images")
    for number in range(options.rounds):
        for url in options.urls[:: -1 if number % 2 else 1]:
            samples = asyncio.run(send(url, asks, f"{number}"))
            times: dict[str, list[float]] = defaultdict(list)
            for ask, sample in zip(asks, samples, strict=True):
                if sample.error:
                    print(f"{url}: {sample.error}")
                elif sample.stamps:
                    for name in ("all", ask.tenant):
                        times[name].append((sample.stamps[0] - sample.started) * 1e3)
            texts = [
                f"{name} {statistics.median(some):,.0f} of {len(some)}"
                for name, some in sorted(times.items())
            ]
            print(f"round {number} {url}: TTFT p50 ms: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
