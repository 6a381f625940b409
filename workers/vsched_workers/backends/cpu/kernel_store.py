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
import logging
import os
import pickle
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
import numba.np.arrayobj  # loading a kernel imports it; here, once for all forked ranks
from llvmlite import binding
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

import vsched.types

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
KERNELS = FOLDER / "kernels"
SOURCES = (
    Path(vsched.types.__file__),
    FOLDER.parents[1] / "batching" / "kv_cache.py",
    *(
        file
        for name in ("kernels", "quantized", "tiles", "compiled_step")
        for file in (FOLDER / name).glob("*.py")
    ),
)
"""Sources of all kernels, and of constants and functions that are compiled into them."""
UNUSED_DAYS_MAX = 30
_DIGEST_BYTES = 16


def kernel_folder() -> Path | None:
    """Return the folder of compiled kernels; None if there is none and none can be created.

    Creating a folder removes the folders of other sources that were unused for a month.
    """
    failures = []
    for root in _roots():
        folder = root / f"kernels-{_sources()}"
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, parents=True)
            except OSError as error:
                failures.append(f"{root}: {error.strerror}")
                continue
            _remove_unused(root)
        with suppress(OSError):
            os.utime(folder)
        return folder
    _warn_once(", ".join(failures))
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
    return f"{content_key(SOURCES)}-{versions}"


@functools.cache
def processor() -> str:
    """Digest of the processor model and features, for which compiled code is specific."""
    described = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    return hashlib.blake2b(described.encode(), digest_size=6).hexdigest()


def _remove_unused(root: Path) -> None:
    oldest_s = time.time() - UNUSED_DAYS_MAX * 86400
    for folder in root.glob("kernels-*"):
        with suppress(OSError):
            if folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder)


def keep_on_disk(dispatcher: Any) -> None:
    """Read a function's compiled code from the folder, and write it there if missing."""
    folder = kernel_folder()
    if folder is not None:
        dispatcher._cache = _KernelCache(dispatcher.py_func, folder)  # noqa: SLF001 - numba offers a choice of folders only


class _KernelCache:
    """The cache of one function in the role of numba's own: a file for each signature and processor."""

    def __init__(self, function: Any, folder: Path) -> None:
        module, line = function.__module__, function.__code__.co_firstlineno
        name = f"{module.rpartition('.')[2]}.{function.__qualname__}-{line}"
        # Stored code contains the name of its module, so a moved file must not match.
        described = f"{module} {sys.implementation.cache_tag}"
        self._prefix = folder / f"{name}-{_digest(described.encode()).hex()}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Read compiled code; without what numba loads for compiling, which takes 0.2 s."""
        rtsys.initialize(target_context)
        try:
            content = self._file(signature, target_context.codegen()).read_bytes()
        except OSError:
            return None
        if content[-_DIGEST_BYTES:] != _digest(content[:-_DIGEST_BYTES]):
            return None  # truncated by a full disk or a crash
        return CompileResult._rebuild(target_context, *pickle.loads(content))  # noqa: S301, SLF001 - see the head

    def save_overload(self, signature: Any, made: Any) -> None:
        """Write compiled code."""
        assert not made.library.has_dynamic_globals, "addresses of this process are in the code"
        file = self._file(signature, made.codegen)
        content: bytes = dumps(made._reduce())  # noqa: SLF001 - as numba's own cache does
        partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
        try:
            partial.write_bytes(content + _digest(content))
            partial.replace(file)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            _warn_once(f"{file.parent}: {error.strerror}")

    def _file(self, signature: Any, codegen: Any) -> Path:
        key = repr((signature, codegen.magic_tuple())).encode()
        return self._prefix.with_name(f"{self._prefix.name}.{_digest(key).hex()}")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning(
        "compiled kernels cannot be stored, and are compiled again at each start, which takes minutes (%s). "
        "Remedy: set NUMBA_CACHE_DIR to a writable folder",
        why,
    )
