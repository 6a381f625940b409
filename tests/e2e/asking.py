"""Questions of clients, and reading of answers, shared by all end-to-end tests."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests.patience import patience
from vsched import Engine, SamplingParams
from vsched.aio.streams import Generation, OutputDelta, TokenLogprob
from vsched.worker.contract import Preprocessor

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias=((40, 2.0), (41, -100.0)),
    bad_words=((45,), (40, 46)),
    min_tokens=10,
    max_tokens=40,
    seed=5,
    ignore_eos=True,
)

SIZES = [(90, 60), (33, 33), (140, 100), (60, 170), (200, 70), (112, 112), (64, 40)]
TEXTS = [
    "What is in the image?",
    "Describe the picture in one sentence, please: the colour of the sky, and what the sign says.",
    "How many objects are there? Answer with a single word.",
    "Tell me what changed between the images. " * 5,
    "0 1 2 3 4 5 6 7 8 9 10",
]


def drawn_image(seed: int, size: tuple[int, int] = (90, 60)) -> Image.Image:
    """Return a picture with some structure, so that images differ in more than noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def data_url(image: Image.Image) -> str:
    """Return an image as a client sends it, without loss."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Ask:
    """One question: text, images before it, and the number of tokens of the answer."""

    text: str = TEXTS[0]
    images: Sequence[Image.Image] = ()
    count: int = 24
    system: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        urls = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in self.images]
        requested: list[dict[str, Any]] = [
            {"role": "user", "content": [*urls, {"type": "text", "text": self.text}]}
        ]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *requested]

    def prompt(self, preprocessor: Preprocessor) -> list[int]:
        """Return the prompt as transformers takes it: placeholders expanded."""
        plans = [preprocessor.plan_image(*image.size) for image in self.images]
        token_ids = preprocessor.tokenize(preprocessor.render(self.messages))
        return preprocessor.expand(token_ids, plans)[0]


def mixed_asks() -> list[Ask]:
    """Return 16 questions with 0 to 4 images of mixed sizes; some share a prefix, some an image."""
    asks = []
    for number in range(16):
        images = [
            drawn_image((3 * number + index) % 19, SIZES[(number + 2 * index) % len(SIZES)])
            for index in range(number % 5)
        ]
        system = "You are a helpful assistant. Answer in a word." if number % 3 == 0 else ""
        text = TEXTS[(number + number // 5) % len(TEXTS)]
        asks.append(Ask(text, images, count=16 + 3 * (number % 7), system=system))
    return asks


@dataclass
class Answer:
    """Everything received for one request."""

    deltas: list[OutputDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [one for delta in self.deltas for one in delta.logprobs or ()]

    @property
    def finish_reason(self) -> str | None:
        assert all(delta.finish_reason is None for delta in self.deltas[:-1])
        return self.deltas[-1].finish_reason


_numbers = iter(range(1 << 30))


async def begin(
    engine: Engine,
    ask: Ask,
    sampling: SamplingParams | None = None,
    request_id: str = "",
    **options: Any,
) -> Generation:
    """Submit a question; without `sampling` it is greedy and gets exactly the question's number of tokens."""
    chosen = sampling or SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ask.count)
    async with patience():
        return await engine.generate(
            prompt=engine.preprocessor.render(ask.messages),
            images=[data_url(image) for image in ask.images],
            sampling=chosen,
            request_id=request_id or f"ask-{next(_numbers)}",
            **options,
        )


async def read(generation: Generation) -> Answer:
    """Read a generation to its end."""
    async with patience():
        return Answer([delta async for delta in generation])


async def answer(
    engine: Engine, ask: Ask, sampling: SamplingParams | None = None, request_id: str = ""
) -> Answer:
    """Ask and read the complete answer."""
    return await read(await begin(engine, ask, sampling, request_id))


async def choices(engine: Engine, asks: Sequence[Ask], *, at_once: int) -> list[Answer]:
    """Ask all, `at_once` at a time; return the answers in order."""
    gate = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with gate:
            return await answer(engine, ask)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(ask)) for ask in asks]
    return [task.result() for task in tasks]


def held(engine: Engine) -> dict[str, int]:
    """Resources held by requests at this moment, by name; all 0 when no request is served."""
    now = engine.statistics()
    encode, generate, media = now["encode"], now["generate"], now["media"]
    return {
        "running": now["running"],
        "waiting": now["waiting"],
        "blocks_held": generate["blocks_held"],
        "preempted": generate["preempted"],
        "swap_blocks_held": generate["swap_blocks_held"],
        "waiting_items": encode["waiting_items"],
        "pixel_bytes": media["pixels"]["bytes_held"],
        "preparing": media["preparing"],
    }


def in_flight(engine: Engine) -> dict[str, int]:
    """Resources used by steps in flight; 0 once their results are in."""
    now = engine.statistics()
    encode, generate = now["encode"], now["generate"]
    used = encode["pages_total"] - encode["pages_free"] - encode["pages_evictable"]
    return {
        "steps_in_flight": generate["steps_in_flight"],
        "running_items": encode["running_items"],
        "pages_used": used,
    }


def now_and_then(token: int, say: Callable[[float], list[int]]) -> tuple[float, list[int]]:
    """Return a bias with which a model yields a token among others, and its output then."""
    low, high = 0.0, 64.0
    while True:
        bias = (low + high) / 2
        said = say(bias)
        if said[: len(said) // 2].count(token) > 0 and set(said) != {token}:
            return bias, said
        assert high - low > 1e-3, "no bias yields the token only sometimes"
        low, high = (bias, high) if token not in said else (low, bias)
