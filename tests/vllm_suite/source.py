"""vLLM's sources, from PyPI's sdist: fetched by pip, which builds nothing of it, and unpacked into the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGES = (
    "pytest==9.0.1",
    "pytest-asyncio==1.5.0",
    "pytest-timeout==2.4.0",
    "pluggy",
    "iniconfig",
    "cloudpickle",
    "tblib",
)
"""What the tests need beside vLLM; without their dependencies, which vLLM's environment has."""

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
"""pip asks a source for its metadata, for which vLLM's own build would want torch and a compiler."""


def fetch(cache: Path, version: str) -> Path:
    """Return the folder of the sources of a version, fetched unless they are in the cache."""
    folder = cache / f"vllm-{version}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    backend = cache / "backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(BACKEND.format(version=version))
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--use-pep517",
        "--no-binary",
        "vllm",
        "--dest",
        str(cache),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, f"vllm=={version}"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
    )
    unpacking = cache / "unpacking"
    with tarfile.open(cache / f"vllm-{version}.tar.gz") as archive:
        inside = f"vllm-{version}/tests/"
        archive.extractall(
            unpacking, [m for m in archive if m.name.startswith(inside)], filter="data"
        )
    (unpacking / folder.name).rename(folder)
    return folder


def packages(cache: Path, python: Path) -> Path:
    """Return a folder with pytest for an environment that is left as it is."""
    folder = cache / "packages"
    if not folder.exists():
        options = ["--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([str(python), "-m", "pip", "install", *options, *PACKAGES], check=True)
    return folder
