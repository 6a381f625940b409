"""The memory of a device as a rank sees it, and a real limit on the memory of a process.

A rank on a CPU is bounded by `RLIMIT_DATA`, which counts the private writable mappings of the process whether or not
anybody wrote to them. What the C library keeps of freed memory counts, too: it is told to keep most of it (see
`vsched.aio.replicas.process`), so that what the largest steps took is held from then on. A KV cache is
a mapping of its own, and goes back whole.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.policy import RankMemory

PROCESS_STATUS = Path("/proc/self/status")
_HOST_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NEWER_NAMES = ("memory.max", "memory.current", "inactive_file")
_OLDER_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""What limit, use and droppable pages of a control group are called, in version 2 and 1."""
SPARE_BYTES = 4 << 20
KV_REMEDY = "raise generate.memory_limit, or make the KV cache smaller (generate.memory)"
"""What helps once a generate rank has loaded."""


class DeviceMemory(Protocol):
    """The memory of one device; every method returns bytes.

    Attributes:
        name: The device as torch names it.
        pool: What the memory belongs to: two ranks with the same pool take from each other.
    """

    @property
    def name(self) -> str: ...

    @property
    def pool(self) -> str: ...

    def total(self) -> int:
        """Return what this process could use at most, were it alone."""
        ...

    def available(self) -> int:
        """Return what the device can still give; what the own allocator caches is not in it."""
        ...

    def reserved(self) -> int:
        """Return what this process holds, its allocator's caches included."""
        ...

    def allocated(self) -> int:
        """Return what is in use; the rest of `reserved` is cache."""
        ...

    def peak(self) -> int:
        """Return the highest `reserved` since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        ...

    def drift(self, growth_bytes: int) -> int:
        """Return by how much work may exceed a measured growth though its shapes are no larger.

        What it takes may depend on where the pieces before it lay, and libraries may go on to keep small ones. It is 0
        where an allocator splits and joins blocks at will.
        """
        ...

    def release(self) -> None:
        """Give back what the allocator caches."""
        ...

    def settle(self) -> None:
        """Take notice that sizes are known: what is sure to be had again when it is needed may go back until then."""
        ...

    def hold(self, size: int) -> AbstractContextManager[None]:
        """Allocate `size` bytes until the context ends, so that nobody else can have them.

        Raises:
            DeviceOutOfMemory: When they cannot be had.
        """
        ...


def measure_rank(
    memory: DeviceMemory, *, rank: int, weights_bytes: int, adapter_bytes: int = 0
) -> RankMemory:
    """Return what a rank holds of its device now, and what is free there."""
    return RankMemory(
        rank=rank,
        pool=memory.pool,
        total_bytes=memory.total(),
        available_bytes=memory.available(),
        reserved_bytes=memory.reserved(),
        weights_bytes=weights_bytes,
        adapter_bytes=adapter_bytes,
    )


@contextmanager
def memory_errors(doing: str, *, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory of Python and of the loader of libraries into the type that policies know.

    `remedy` names the settings of the process that this is. What torch raises a worker turns itself.
    """
    # Made before, for making it takes memory.
    failure = DeviceOutOfMemory(f"memory ran out while {doing}. Remedy: {remedy}.")
    try:
        yield
    except (MemoryError, SystemError, ImportError, OSError, RuntimeError) as error:
        # An extension that gives up half-way says "error return without exception set"; the loader of libraries
        # names the mapping that it could not get, and the importer the folder that it could not list.
        words = (
            "without exception set",
            "annot allocate memory",
            "failed to map segment",
            "cannot map zero-fill pages",
            "could not create a primitive",  # oneDNN
        )
        if isinstance(error, MemoryError) or any(word in str(error) for word in words):
            raise failure from error
        raise


@contextmanager
def spare_memory() -> Iterator[None]:
    """Hold a little memory until the body ends: where that got none, its error can be told with this."""
    with mmap.mmap(-1, SPARE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        yield


def limit_process_memory(limit_bytes: int, *, keys: str) -> None:
    """Bound the private memory of this process, for good; 0 is no limit. `keys` are the settings that say so.

    Raises:
        DeviceOutOfMemory: When the process holds more already.
    """
    if limit_bytes <= 0:
        return
    held = status_bytes("VmData")
    if held >= limit_bytes:
        raise DeviceOutOfMemory(
            limit_message(
                f"{keys}: the memory limit of a rank is below what it holds before it loads (bytes)",
                value=held,
                limit=limit_bytes,
                remedy=f"raise {keys}",
            )
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def process_limit() -> int | None:
    """Return the limit on the private memory of this process, None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def host_total() -> int:
    """Return the memory of the host, or of a control group where that is smaller, in bytes."""
    host = status_bytes("MemTotal", _HOST_MEMORY)
    return min([host, *(group.limit_bytes for group in _control_groups())])


def host_available() -> int:
    """Return what the host or the control groups can still give, in bytes."""
    host = status_bytes("MemAvailable", _HOST_MEMORY)
    free = [max(0, group.limit_bytes - group.used_bytes) for group in _control_groups()]
    return min([host, *free])


def tells_what_is_free() -> bool:
    """Return whether `host_available` is to be relied on: the host tells, and limits of control groups can be seen."""
    seen = any((_GROUPS / name).exists() for name in ("cgroup.controllers", "unified", "memory"))
    return seen and status_bytes("MemAvailable", _HOST_MEMORY) > 0


class _ControlGroup(NamedTuple):
    """A limit on this process and others, and what they use, file pages that can be dropped at once not counted."""

    limit_bytes: int
    used_bytes: int


def _control_groups() -> Iterator[_ControlGroup]:
    """Yield the control groups with a limit that this process is in, those above its own included."""
    for folder, newer in control_group_folders("memory"):
        limit, used, dropped = _NEWER_NAMES if newer else _OLDER_NAMES
        limit_bytes, used_bytes = _number(folder / limit), _number(folder / used)
        if limit_bytes is not None and used_bytes is not None:
            yield _ControlGroup(limit_bytes, used_bytes - _of_statistics(folder, dropped))


def control_group_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups, the innermost first, and whether they are of version 2."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = ["0::/", f"0:{controller}:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _GROUPS / controller if controllers else _GROUPS
        own = base / path.strip("/")
        # In a container the path may be that outside of it; then only the base is there.
        for folder in (own, *own.parents):
            yield folder, not controllers
            if folder == base:
                break


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no file, or no number but `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _of_statistics(folder: Path, name: str) -> int:
    """Return a value of a control group's statistics, in bytes; 0 where there is none."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def status_bytes(field: str, path: Path = PROCESS_STATUS) -> int:
    """Return one line of a status file of the kernel, which counts in KiB; 0 when it is not there."""
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
