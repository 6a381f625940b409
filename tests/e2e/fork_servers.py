"""One fork server for all engines of a process, for each would import for seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.workers.parallel.ranks import forkable_everywhere
from vsched.aio import fork_server, launcher


class SharedForkServer(fork_server.ForkServer):
    """Exists before the engines that use it, and outlives them."""

    async def import_all(self) -> None:
        (await self.open()).close()

    def close(self) -> None:
        pass


@contextmanager
def one_fork_server() -> Iterator[None]:
    """Let all engines share one fork server, which has imported the modules of most tests."""
    shared = SharedForkServer(forkable_everywhere())
    asyncio.run(shared.import_all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "ForkServer", lambda *_: shared)
        yield
    fork_server.ForkServer.close(shared)
