"""Real requests for simulated ones: token ids and pictures that make an engine do the simulated work."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from vsched.bench.load.cases import draw_picture, draw_text
from vsched.errors import ConfigError
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload
from vsched.types import SamplingParams
from vsched.worker.contract import ImagePlan, Preprocessor, extent_bytes

WORDS = 4000
"""Number of random words to tokenize when collecting ordinary tokens."""
SPACE = Text(0, 1)
"""Separates two images, which must not be adjacent."""
UNIT_MAX = 256
"""Maximum pixels per token, as the side of a square."""


class RequestTexts:
    """Creates real prompts and pictures for a checkpoint.

    Attributes:
        pixels_per_token: Pixels per image token.
        bytes_per_token: Encoder input bytes per image token.
    """

    def __init__(self, preprocessor: Preprocessor, *, words: str = "") -> None:
        """Prepare for a checkpoint; prompts use the tokens of `words`, by default random ones."""
        self._preprocessor = preprocessor
        rng = random.Random(0)  # noqa: S311 - a load, not a secret
        # Word by word, because all together might exceed the context.
        tokens = {
            token
            for word in (words or draw_text(rng, WORDS)).split()
            for token in preprocessor.tokenize(f" {word}")
        }
        self._ordinary = sorted(tokens - {preprocessor.info.image_token_id})
        self._unit, plan = self._find_unit()
        self.pixels_per_token = self._unit**2
        self.bytes_per_token = -(-extent_bytes(plan.arrays) // plan.tokens)

    def _find_unit(self) -> tuple[int, ImagePlan]:
        """Return the side of the pixel square that becomes a token, and the plan of a large picture of such squares.

        Processors round sizes, so only a picture with many tokens determines it exactly.
        """
        plan_image = self._preprocessor.plan_image
        rows = max(math.isqrt(self._preprocessor.info.item_tokens_max), 1)
        half = max(rows // 2, 1)
        for side in range(UNIT_MAX, 0, -1):
            plan = plan_image(rows * side, rows * side)
            smaller = plan_image(half * side, rows * side)
            if (plan.tokens, smaller.tokens) == (rows * rows, half * rows):
                return side, plan
        raise ConfigError(
            f"no picture becomes {rows} x {rows} tokens. Remedy: check the image processor of the checkpoint"
        )

    def size_of(self, tokens: int) -> tuple[int, int]:
        """Return width and height of a picture with about `tokens` tokens, within the image limit."""
        tokens = min(tokens, self._preprocessor.info.item_tokens_max)
        rows = max(math.isqrt(tokens), 1)
        return tokens // rows * self._unit, rows * self._unit

    def pixels_of(self, tokens: int) -> int:
        """Return the pixels of a picture with as close to `tokens` tokens as possible."""
        width, height = self.size_of(self.tokens_of(tokens))
        return width * height

    def tokens_of(self, tokens: int) -> int:
        """Return the exact token count of the picture closest to `tokens`."""
        return self._preprocessor.plan_image(*self.size_of(tokens)).tokens

    def text(self, content: int, tokens: int) -> list[int]:
        """Return ordinary tokens; of two texts with the same content, one is a prefix of the other."""
        rng = random.Random(content)  # noqa: S311 - a load, not a secret
        return rng.choices(self._ordinary, k=tokens)

    def picture(self, key: str, tokens: int) -> str:
        """Return the picture of a key with about `tokens` tokens, as a `data:` URL."""
        seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
        return draw_picture(seed, *self.size_of(tokens), "JPEG", quality=85)

    def fit(self, workload: Workload) -> Workload:
        """Return the workload with the sizes of real requests close to it, materialized."""
        arrivals = [self.fit_arrival(arrival) for arrival in workload]
        return Workload(workload.name, lambda: iter(arrivals), len(arrivals), workload.notes)

    def fit_arrival(self, arrival: Arrival) -> Arrival:
        """Return an arrival with the real sizes of its pictures, and a token between adjacent ones."""
        prompt: list[PromptPart] = []
        for part in arrival.prompt:
            if type(part) is Image:
                if prompt and type(prompt[-1]) is Image:
                    prompt.append(SPACE)
                prompt.append(Image(part.key, self.tokens_of(part.tokens)))
            else:
                prompt.append(part)
        return msgspec.structs.replace(arrival, prompt=tuple(prompt))

    def pictures(self, arrival: Arrival) -> list[str]:
        """Return the pictures of an arrival, in order."""
        return [self.picture(arrival.key_of(image), image.tokens) for image in arrival.images]

    def call(
        self, arrival: Arrival, pictures: list[str], replies: Sequence[Sequence[int]] = ()
    ) -> dict[str, Any]:
        """Return the arguments of `Engine.generate` for a fitted arrival; see `prompt` and `pictures`."""
        return {
            "prompt": self.prompt(arrival, replies),
            "images": pictures,
            "sampling": SamplingParams(
                max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True
            ),
            "request_id": arrival.request_id,
            "priority": arrival.priority,
            "ttft_target_ms": arrival.ttft_target_ms,
            "cache_salt": arrival.tenant,
        }

    def prompt(self, arrival: Arrival, replies: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the prompt of an arrival with one placeholder per image.

        `replies` are the outputs of earlier turns.
        """
        ids: list[int] = []
        left = list(replies)
        for part in arrival.prompt:
            if type(part) is Text:
                ids += self.text(part.content, part.tokens)
            elif type(part) is Image:
                ids.append(self._preprocessor.info.placeholder)
            else:
                ids += left.pop(0)[: part.tokens]
        return ids
