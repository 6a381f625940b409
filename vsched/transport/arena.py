"""The data plane on one host: anonymous shared memory for pixels and embeddings.

The engine creates it with `memfd_create` and hands the descriptor down to its ranks. It has no name, so nothing can be
left behind: the memory is gone when the last process that maps it is, however that process ended. A killed rank takes
nothing with it, because the engine holds the mapping.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from vsched.errors import ConfigError, limit_message
from vsched.types import ArenaLayout, Extent


class Arena:
    """A mapping of the arena in this process."""

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        self.fd = fd
        self.layout = layout
        # An arena of nothing, where there are no images, cannot be mapped.
        self._map = mmap.mmap(fd if layout.total_bytes else -1, layout.total_bytes or mmap.PAGESIZE)

    @classmethod
    def create(cls, layout: ArenaLayout) -> Arena:
        """Create the shared memory; pages are taken from the host only when they are written.

        Raises:
            ConfigError: When the host's memory is smaller than the arena.
        """
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if layout.total_bytes > host_bytes:
            raise ConfigError(
                limit_message(
                    "arena: larger than the host's memory",
                    value=layout.total_bytes,
                    limit=f"{host_bytes} bytes",
                    remedy="lower arena.pixel_bytes or arena.embedding_bytes",
                )
            )
        fd = os.memfd_create("vsched-arena")
        os.ftruncate(fd, layout.total_bytes)
        return cls(fd, layout)

    @property
    def pixels(self) -> memoryview:
        """The pixel region, writable."""
        return memoryview(self._map)[: self.layout.pixel_bytes]

    @property
    def embeddings(self) -> npt.NDArray[np.uint8]:
        """The embedding region, uint8 [pages, rows a page, bytes a row], writable."""
        layout = self.layout
        region = np.frombuffer(
            self._map, dtype=np.uint8, count=layout.embedding_bytes, offset=layout.embedding_offset
        )
        return region.reshape(layout.pages, layout.page_rows, layout.row_bytes)

    def read(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return an extent of the pixel region as bytes, uint8 [size]."""
        return np.frombuffer(self._map, dtype=np.uint8, count=extent.size, offset=extent.offset)

    def copy(self, offset: int, size: int) -> bytes:
        """Return bytes of the arena, counted from its begin."""
        return self._map[offset : offset + size]

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the arena, which must have room for them there."""
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Give the descriptor back; the mapping goes when its last view does."""
        os.close(self.fd)
