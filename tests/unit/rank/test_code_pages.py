"""Pages of native code that only the imports of a rank need are released."""

from __future__ import annotations

from pathlib import Path

from vsched.fork_server import drop_code_pages


def code_kib() -> int:
    """Resident size of this process's native code, in KiB."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            is_code = rest.startswith("r-xp")
        elif is_code and first == "Rss:":
            total += int(rest.split()[0])
    return total


def test_drop_code_pages_unmaps_code_that_still_runs() -> None:
    before = code_kib()
    drop_code_pages()
    assert code_kib() < before
    assert sorted([2, 1]) == [1, 2]
