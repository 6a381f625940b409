"""Patches torchvision, which is built for CUDA, in the environment of a peer with torch's CPU build."""

from __future__ import annotations

import re
from pathlib import Path

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
    """Return torchvision's registrations, limited to existing operators."""
    pattern = r'^@torch\.library\.register_fake\("torchvision::(\w+)"\)'
    return re.sub(pattern, r'@register_meta("\1")', source, flags=re.MULTILINE)


def decode_without_operators(source: str) -> str:
    """Return torchvision's image reader with a fallback if its compiled decoder is missing."""
    if "_pil_decode" in source:
        return source
    start = source.index("def decode_image(")
    place = source.index("_assert_has_image_ops()", start)
    return source[:place] + ASKS_OPERATOR + source[place:] + DECODER


def patch_torchvision(folder: Path) -> None:
    """Make torchvision importable with torch's CPU build, and able to decode images."""
    for name, mend in (
        ("_meta_registrations.py", register_when_there),
        ("io/image.py", decode_without_operators),
    ):
        path = packages_of(folder) / "torchvision" / name
        path.write_text(mend(path.read_text()))


def packages_of(folder: Path) -> Path:
    """Return the package folder of an environment."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found
