"""OpenVINO GenAI as a peer: checkpoints exported by optimum-intel, and served by `openvino_server.py`."""

from __future__ import annotations

from pathlib import Path

from tests.bench.servers.conversion import made_from, make_when_missing
from tests.bench.servers.llamacpp import has_tower

VERSION = "2026.4.1"
PACKAGES = (
    f"openvino=={VERSION}",
    f"openvino-genai=={VERSION}",
    "optimum-intel==2.2.0",
    "nncf>=3.4,<4",
    "transformers==5.0.0",  # later versions cannot be exported as Qwen2.5-VL
    "torch==2.13.0",
    "torchvision",
    "pillow",
)
PROGRAM = Path(__file__).with_name("openvino_server.py")


def model_of(folder: Path, checkpoint: Path, weights: str) -> Path:
    """Return the path of the export of a checkpoint."""
    return made_from(folder, checkpoint, weights)


def export_when_missing(weights: str, folder: Path, checkpoint: Path) -> None:
    """Export a checkpoint with weights of this type, unless that was done."""
    task = "image-text-to-text" if has_tower(checkpoint) else "text-generation-with-past"
    command = [str(folder / "bin" / "optimum-cli"), "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", task, "--weight-format", weights]
    make_when_missing(
        model_of(folder, checkpoint, weights),
        command,
        environment={"HF_HUB_OFFLINE": "1"},
        what=f"{checkpoint} could not be exported to OpenVINO",
    )
