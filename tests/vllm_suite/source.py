"""vLLM's sources and the packages that its tests import, from PyPI: an sdist that is not built, and an environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

UNWANTED = re.compile(
    r"(xgrammar|depyf|compressed.tensors|ninja|lm.format.enforcer|outlines.core|setuptools|six)\b"
)
"""Requirements of vLLM that its server's tests do without, or that would install CUDA's libraries."""

ALONE = ("xgrammar==0.2.8", "apache-tvm-ffi", "tblib", "cloudpickle")
"""Imports of the tests that are installed without their own requirements."""

TESTING = (
    "pytest==8.4.2",
    "pytest-asyncio==1.5.0",
    "pytest-timeout==2.4.0",
    "schemathesis==4.32.5",
    "starlette>=1.0.1",
)

BACKEND = """
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = Path(directory) / "vllm.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return folder.name
"""
"""Pip queries a source for its metadata, for which vLLM's own build would need torch and a compiler."""


def fetch(cache: Path, version: str) -> Path:
    """Return the folder of the sources of a version, fetched unless they are in the cache."""
    cache = cache.absolute()  # pip reads the backend's path in a folder of its own
    folder = cache / f"vllm-{version}"
    if folder.exists():
        return folder
    backend = cache / "backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(BACKEND.format(version=version))
    options = ["--no-deps", "--no-build-isolation", "--use-pep517", "--no-binary", "vllm"]
    options += ["--dest", str(cache), f"vllm=={version}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options],
        check=True,
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
    )
    unpacking = cache / "unpacking"
    wanted = re.compile(rf"vllm-{re.escape(version)}/(tests|vllm|requirements/common.txt)")
    with tarfile.open(cache / f"vllm-{version}.tar.gz") as archive:
        archive.extractall(unpacking, [m for m in archive if wanted.match(m.name)], filter="data")
    (unpacking / folder.name).rename(folder)
    return folder


def environment(cache: Path, sources: Path) -> Path:
    """Return the Python of an environment in which vLLM's tests can be imported, created unless it is in the cache.

    vLLM is not installed: its Python files are imported as they are. torch is that of vsched's own environment, which
    is added to the path of this one.
    """
    folder, done = cache / "environment", cache / "environment" / "done"
    python = folder / "bin" / "python"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    behind = f"lib/python{sysconfig.get_python_version()}/site-packages/vsched_behind.pth"
    (folder / behind).write_text(sysconfig.get_path("purelib") + "\n")
    asked = (sources / "requirements" / "common.txt").read_text().splitlines()
    chosen = [line for line in asked if not UNWANTED.match(line)]
    list_ = folder / "requirements.txt"
    list_.write_text("\n".join([*chosen, *TESTING]))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", str(list_)], check=True)
    subprocess.run([*install, "--no-deps", *ALONE], check=True)
    done.touch()
    return python
