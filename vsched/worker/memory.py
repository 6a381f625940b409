"""The memory of a rank's device, and a hard limit on the memory of a process.

A rank on a CPU is limited by `RLIMIT_DATA`, which counts the private writable mappings of the process, whether or not
they were written. Freed memory that the C library keeps counts, too; it is configured to keep most of it (see
`vsched.fork_server`), so that the memory of the largest steps is held after the first one. A KV cache
is a separate mapping, which is returned completely.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from vsched.errors import DeviceOutOfMemory

PROCESS_STATUS = Path("/proc/self/status")
_HOST_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NEWER_NAMES = ("memory.max", "memory.current", "inactive_file")
_OLDER_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""File and field names for limit, use and droppable pages of a control group, in version 2 and 1."""
SPARE_BYTES = 4 << 20
KV_REMEDY = "raise generate.memory_limit, or make the KV cache smaller (generate.memory)"
"""Remedy for out-of-memory errors after a generate rank has loaded."""


class DeviceMemory(Protocol):
    """The memory of one device; every method returns bytes.

    Attributes:
        name: The device's name in torch.
        pool: Name of the memory: ranks with the same pool share it.
    """

    @property
    def name(self) -> str: ...

    @property
    def pool(self) -> str: ...

    def total(self) -> int:
        """Return the maximum for this process if it were alone."""

    def available(self) -> int:
        """Return the free memory of the device, without this process's allocator cache."""

    def reserved(self) -> int:
        """Return the memory held by this process, including its allocator's caches."""

    def allocated(self) -> int:
        """Return the memory in use; the rest of `reserved` is cache."""

    def peak(self) -> int:
        """Return the highest `reserved` since the last reset."""

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""

    def drift(self, growth_bytes: int) -> int:
        """Return the memory by which work may exceed a measured growth, although its shapes are not larger.

        Reasons are fragmentation, and small allocations that libraries keep. It is 0 for an allocator that splits and
        joins blocks freely.
        """

    def release(self) -> None:
        """Release the allocator's cache."""

    def settle(self) -> None:
        """Note that all sizes are known: memory that is certain to be available again may be released until then."""

    def hold(self, size: int) -> AbstractContextManager[None]:
        """Allocate `size` bytes within the context, so that nothing else can use them.

        Raises:
            DeviceOutOfMemory: When there is not enough memory.
        """


@contextmanager
def memory_errors(doing: str, *, remedy: str) -> Iterator[None]:
    """Convert out-of-memory errors of Python and of the dynamic loader to `DeviceOutOfMemory`.

    `remedy` names the settings for this process. Workers convert errors of torch themselves.
    """
    # Created in advance, because that needs memory.
    failure = DeviceOutOfMemory(f"memory ran out while {doing}", remedy=remedy)
    try:
        yield
    except (MemoryError, SystemError, ImportError, OSError, RuntimeError) as error:
        # Messages of C extensions that fail without an exception, of the dynamic loader about a mapping, and of the
        # importer about a folder that it could not list.
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
    """Reserve some memory within the context: if that runs out of memory, its error can be reported with this."""
    with mmap.mmap(-1, SPARE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        yield


def weights_bytes(path: str) -> int:
    """Size of the weight files in a checkpoint's folder; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else 0


def limit_process_memory(limit_bytes: int, *, keys: str, mapped_bytes: int = 0) -> None:
    """Limit the private memory of this process permanently; 0 for no limit. `keys` are the settings of the limit.

    `mapped_bytes` is the size of the weight files, for `mapped_weights`.

    Raises:
        DeviceOutOfMemory: When the process holds more already.
    """
    if limit_bytes <= 0:
        return
    held = status_bytes("VmData")
    if held >= limit_bytes:
        raise DeviceOutOfMemory.of_limit(
            f"{keys}: the memory limit of a rank is below its memory before loading (bytes)",
            value=held,
            limit=limit_bytes,
            remedy=f"raise {keys}",
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY:
        hard = limit_bytes + mapped_bytes
    bounds = min(limit_bytes, hard), min(limit_bytes + mapped_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, bounds)


@contextmanager
def mapped_weights() -> Iterator[None]:
    """Raise the limit of this process by the size of the weight files within the context.

    torch maps them writable, so they count as private memory until they are loaded, although they are never written to.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def process_limit() -> int | None:
    """Return the limit on the private memory of this process; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def host_total() -> int:
    """Return the total memory of the host, or of a control group if that is smaller, in bytes."""
    host = status_bytes("MemTotal", _HOST_MEMORY)
    return min([host, *(group.limit_bytes for group in _control_groups())])


def host_available() -> int:
    """Return the free memory of the host or of its control groups, whichever is smaller, in bytes."""
    host = status_bytes("MemAvailable", _HOST_MEMORY)
    free = [max(0, group.limit_bytes - group.used_bytes) for group in _control_groups()]
    return min([host, *free])


def reports_free_memory() -> bool:
    """Return True if `host_available` is reliable: the host reports it, and limits of control groups are visible."""
    seen = any((_GROUPS / name).exists() for name in ("cgroup.controllers", "unified", "memory"))
    return seen and status_bytes("MemAvailable", _HOST_MEMORY) > 0


class _ControlGroup(NamedTuple):
    """Limit and use of the memory of a control group, without file pages that can be dropped."""

    limit_bytes: int
    used_bytes: int


def _control_groups() -> Iterator[_ControlGroup]:
    """Yield the control groups of this process with a limit, including parent groups."""
    for folder, newer in control_group_folders("memory"):
        limit, used, dropped = _NEWER_NAMES if newer else _OLDER_NAMES
        limit_bytes, used_bytes = _number(folder / limit), _number(folder / used)
        if limit_bytes is not None and used_bytes is not None:
            yield _ControlGroup(limit_bytes, used_bytes - _of_statistics(folder, dropped))


def control_group_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups, innermost first, with True for version 2."""
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
        # In a container the path may be the one outside of it; then only the base exists.
        for folder in (own, *own.parents):
            yield folder, not controllers
            if folder == base:
                break


def _number(path: Path) -> int | None:
    """Return the number in a file; None without a file, or for `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _of_statistics(folder: Path, name: str) -> int:
    """Return a value of a control group's statistics, in bytes; 0 without one."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def status_bytes(field: str, path: Path = PROCESS_STATUS) -> int:
    """Return a field of a kernel status file, given there in KiB, in bytes; 0 if it does not exist."""
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
