"""The data plane on one host: anonymous shared memory for pixels and embeddings.

The engine creates it with `memfd_create` and passes the descriptor to its ranks. It has no name, so it cannot leak: the
memory is freed when the last process that maps it exits, in whatever manner. It survives a killed rank, because the
engine holds the mapping.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from vsched.errors import ConfigError
from vsched.types import ArenaLayout, Extent


class Arena:
    """This process's mapping of the arena."""

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        self.fd = fd
        self.layout = layout
        # An empty mapping is not possible, so an empty arena (without images) maps one page.
        self._map = mmap.mmap(fd if layout.total_bytes else -1, layout.total_bytes or mmap.PAGESIZE)

    @classmethod
    def create(cls, layout: ArenaLayout) -> Arena:
        """Create the shared memory; the host allocates pages on the first write.

        Raises:
            ConfigError: If the arena is larger than the host's memory.
        """
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if layout.total_bytes > host_bytes:
            raise ConfigError.of_limit(
                "arena: larger than the host's memory",
                value=layout.total_bytes,
                limit=f"{host_bytes} bytes",
                remedy="lower arena.pixel_bytes or arena.embedding_bytes",
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
        """The embedding region, uint8 [pages, rows per page, bytes per row], writable."""
        layout = self.layout
        region = np.frombuffer(
            self._map, dtype=np.uint8, count=layout.embedding_bytes, offset=layout.embedding_offset
        )
        return region.reshape(layout.pages, layout.page_rows, layout.row_bytes)

    def read(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return an extent of the pixel region as bytes, uint8 [size]."""
        return np.frombuffer(self._map, dtype=np.uint8, count=extent.size, offset=extent.offset)

    def copy(self, offset: int, size: int) -> bytes:
        """Copy bytes out of the arena; `offset` counts from its start."""
        return self._map[offset : offset + size]

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the arena at `offset`."""
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Close the descriptor, and the mapping, unless a view of it is in use: then it is released with the last."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):
            self._map.close()
