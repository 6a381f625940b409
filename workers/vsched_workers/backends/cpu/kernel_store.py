"""On-disk store of compiled kernels, keyed by the content of their sources and shared by all checkouts.

numba's own cache is keyed by the path of the source, so each checkout and each environment compiles again. It also
numbers entries in an index, where two processes that compile at once can take the same number, and a third one then
calls code for other arguments. Here a file name is a digest of everything that the code depends on: the sources of
all kernels, the function and its module, its argument types, the processor, numba and Python. So entries are never
stale or confused, and a concurrent second writer writes the same content. A file gets its name when it is complete,
and its checksum is verified before use.

The folder is `NUMBA_CACHE_DIR`, or `vsched` in `XDG_CACHE_HOME` or `~/.cache`, or else `__pycache__` next to the
sources; a complete folder may be read-only. It may be removed at any time.
"""

# numba is untyped to a type checker.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
from llvmlite import binding
from numba.core import caching
from numba.core.runtime.nrt import rtsys

import vsched.types

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).parent / "kernels"
CONSTANTS = (
    Path(vsched.types.__file__),
    KERNELS.parents[2] / "batching" / "kv_cache.py",
    KERNELS.parent / "quantized" / "kernel.py",
    KERNELS.parent / "quantized" / "block_sums.py",
    KERNELS.parent / "tiles" / "kernel.py",
)
"""Sources of constants and functions that are compiled into kernels."""
UNUSED_DAYS_MAX = 30
_DIGEST_BYTES = 16


def kernel_folder() -> Path | None:
    """Return the folder of compiled kernels; None if there is none and none can be created.

    Creating a folder removes the folders of other sources that were unused for a month.
    """
    for root in _roots():
        folder = root / f"kernels-{_sources()}"
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, parents=True)
            except OSError:
                continue
            _remove_unused(root)
        with suppress(OSError):
            os.utime(folder)
        return folder
    return None


def _roots() -> Iterator[Path]:
    config: Any = numba.config
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    given = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home directory
        yield (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "vsched"
    yield KERNELS / "__pycache__"


def content_key(files: Sequence[Path]) -> str:
    """Digest of the names and contents of files."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(files, key=lambda each: each.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _sources() -> str:
    """Name of the folder: compiler versions and all kernel sources, as any kernel may be compiled into any other."""
    versions = f"numba-{numba.__version__}-llvmlite-{llvmlite.__version__}"
    return f"{content_key([*KERNELS.glob('*.py'), *CONSTANTS])}-{versions}"


@functools.cache
def processor() -> str:
    """Digest of the processor model and features, for which compiled code is specific."""
    described = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    return hashlib.blake2b(described.encode(), digest_size=6).hexdigest()


@functools.cache
def _content_of(file: str) -> str:
    return content_key([Path(file)])


def _remove_unused(root: Path) -> None:
    oldest_s = time.time() - UNUSED_DAYS_MAX * 86400
    for folder in root.glob("kernels-*"):
        with suppress(OSError):
            if folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder)


def keep_on_disk(dispatcher: Any) -> None:
    """Read a function's compiled code from the folder, and write it there if missing."""
    with suppress(RuntimeError):  # no folder
        dispatcher._cache = _KernelCache(dispatcher.py_func)  # noqa: SLF001 - numba offers a choice of folders only


class _Locator(caching._CacheLocator):  # noqa: SLF001
    """Tells numba the folder; file names contain all dependencies of the code."""

    def __init__(self, folder: Path, line: int) -> None:
        self._folder, self._line = folder, line

    @classmethod
    def from_function(cls, py_func: Any, _py_file: str) -> _Locator | None:
        folder = kernel_folder()
        return None if folder is None else cls(folder, py_func.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        """Nothing to do: a failed write is logged."""

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - numba's name and type


class _KernelCache(caching.FunctionCache):
    """numba's cache of one function, with other file names."""

    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        # Stored code contains the name of its module, so a moved file must not match.
        described = f"{function.__module__} {_content_of(inspect.getfile(function))}"
        source = _digest(described.encode()).hex()
        files: Any = _Files(Path(self.cache_path), f"{self._impl.filename_base}-{source}")
        self._cache_file = files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Read compiled code; without what numba loads for compiling, which takes 0.2 s."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


class _Files(caching.IndexDataCacheFile):
    """Files of one function: one for each signature and processor. numba writes and reads their content."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(str(folder), name, "")
        self._folder, self._name = folder, name

    def load(self, key: object) -> Any:
        file = self._file(key)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        if content[-_DIGEST_BYTES:] != _digest(content[:-_DIGEST_BYTES]):
            return None  # truncated by a full disk or a crash
        return self._load_data(file.name)

    def save(self, key: object, data: object) -> None:
        file = self._file(key)
        content: bytes = self._dump(data)
        try:
            with self._open_for_write(str(file)) as opened:
                opened.write(content + _digest(content))
        except OSError as error:
            _warn_once(str(self._folder), str(error))

    def flush(self) -> None:
        for file in self._folder.glob(f"{self._name}.*"):
            file.unlink(missing_ok=True)

    def _file(self, key: object) -> Path:
        return self._folder / f"{self._name}.{_digest(repr(key).encode()).hex()}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _warn_once(folder: str, why: str) -> None:
    logger.warning(
        "compiled kernels cannot be stored in %s, and are compiled again at each start: %s",
        folder,
        why,
    )
