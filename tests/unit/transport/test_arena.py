"""The shared-memory arena: visible to every process that is given it, and to no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vsched.errors import ConfigError
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, Extent

LAYOUT = ArenaLayout(pixel_bytes=1000, pages=6, page_rows=4, row_bytes=32)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(LAYOUT)
    yield arena
    arena.close()


def test_arena_regions_do_not_overlap(arena: Arena) -> None:
    arena.pixels[:] = b"\xff" * LAYOUT.pixel_bytes
    assert arena.embeddings.shape == (6, 4, 32)
    assert not arena.embeddings.any()
    arena.embeddings[:] = 1
    assert bytes(arena.pixels) == b"\xff" * LAYOUT.pixel_bytes
    assert LAYOUT.embedding_offset % 64 == 0
    assert LAYOUT.total_bytes == LAYOUT.embedding_offset + 6 * 4 * 32


def test_arena_reads_are_views(arena: Arena) -> None:
    read = arena.read(Extent(128, 96))
    assert read.shape == (96,)
    assert read.dtype == np.uint8
    arena.pixels[128:132] = np.float32(2.5).tobytes()
    assert read.view(np.float32)[0] == 2.5


def test_arena_has_no_name() -> None:
    """Nothing can be left behind: no file in /dev/shm, and the descriptor is not inherited by accident."""
    before = sorted(os.listdir("/dev/shm"))
    arena = Arena.create(LAYOUT)
    assert sorted(os.listdir("/dev/shm")) == before
    assert "memfd:vsched-arena (deleted)" in os.readlink(f"/proc/self/fd/{arena.fd}")
    assert not os.get_inheritable(arena.fd)
    arena.close()
    assert not Path(f"/proc/self/fd/{arena.fd}").exists() or "vsched-arena" not in os.readlink(
        f"/proc/self/fd/{arena.fd}"
    )


def test_arena_views_outlive_the_descriptor() -> None:
    """A view in use keeps the memory, not the descriptor."""
    arena = Arena.create(LAYOUT)
    rows = arena.embeddings
    rows[0] = 3
    arena.close()
    assert (rows[0] == 3).all()


def test_arena_larger_than_the_host_is_refused() -> None:
    """Value, limit and remedy, before anything is allocated on the host."""
    layout = ArenaLayout(pixel_bytes=1 << 60, pages=1, page_rows=1, row_bytes=1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"value \d+, limit \d+ bytes\. Remedy: lower arena\."):
        Arena.create(layout)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_arena_takes_memory_only_where_it_is_written() -> None:
    """A large arena costs nothing until it is used."""
    arena = Arena.create(ArenaLayout(pixel_bytes=1 << 30, pages=1, page_rows=1, row_bytes=64))
    assert os.fstat(arena.fd).st_blocks == 0
    arena.pixels[:10] = b"x" * 10
    assert 0 < os.fstat(arena.fd).st_blocks * 512 < 1 << 20
    arena.close()
