"""A media pipeline with its parts, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.media.fakes import FakePreprocessor
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import ImageReference, MediaPipeline, PixelStore, PreparedRequest
from vsched.media.fetch import Reserve, fetch
from vsched.media.formats import MediaKind
from vsched.types import MediaItem

ITEM_BYTES = 8 * 48 * 4
"""Pixels of an image of 16 x 8: 2 tokens, 8 patches."""
Images = Sequence[ImageReference]


class Bench:
    """A pipeline and its parts; the context closes it, and asserts that nothing is left."""

    def __init__(
        self,
        settings: MediaConfig | None = None,
        preprocessor: FakePreprocessor | None = None,
        *,
        items: int = 64,
        remote: Mapping[str, bytes] = {},
        store: PixelStore | None = None,
    ) -> None:
        self.preprocessor = preprocessor or FakePreprocessor()
        self.store = store or PixelStore(memoryview(bytearray(items * ITEM_BYTES)))

        async def read(url: str, _: MediaConfig, reserve: Reserve, kind: MediaKind) -> bytes:
            reserve(len(remote[url]))
            return remote[url]

        self.pipeline = MediaPipeline(
            self.preprocessor,
            self.store,
            settings or MediaConfig(),
            read_remote=read if remote else fetch,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.preprocessor.gate.set()
        if error[0] is None:
            await self.all_back()
        self.pipeline.close()

    def start(self, prompt: str, images: Images) -> asyncio.Future[PreparedRequest]:
        """Prepare a request in a task, and release its pixels."""
        return asyncio.ensure_future(self.prepare(prompt, images))

    async def stuck(self, prompt: str, images: Images) -> asyncio.Future[PreparedRequest]:
        """Prepare a request in a task, and wait until a thread is inside the image processor, which is held."""
        self.preprocessor.gate.clear()
        task = self.start(prompt, images)
        assert await asyncio.to_thread(self.preprocessor.entered.wait, PATIENCE_S)
        return task

    async def prepare(
        self, prompt: str | list[int], images: Images = (), salt: str = ""
    ) -> PreparedRequest:
        """Prepare a request and release its pixels, which stay cached."""
        prepared = await self.pipeline.prepare(prompt, images, salt)
        prepared.lease.release()
        return prepared

    async def refusal(self, prompt: str, images: Images, salt: str = "") -> RequestRefused:
        """Return the error of a refused request, which must leave nothing behind."""
        with pytest.raises(RequestRefused) as caught:
            await self.pipeline.prepare(prompt, images, salt)
        await self.all_back()
        return caught.value

    def pixels(self, item: MediaItem) -> npt.NDArray[np.uint8]:
        """Return the bytes in the store."""
        assert item.extent is not None
        return self.store.view(item.extent)

    async def all_back(self) -> None:
        """Wait for threads, then assert that nothing is held, counted or queued."""
        await until(lambda: not self.pipeline._fills._fills)
        await until(lambda: not self.pipeline.statistics().preparing_bytes)
        statistics = self.pipeline.statistics()
        assert (statistics.decode.bytes_used, statistics.decode.waiting) == (0, 0)
        assert (statistics.preparing, statistics.preparing_bytes) == (0, 0)
        assert (statistics.pixels.bytes_held, statistics.pixels.waiting) == (0, 0)
