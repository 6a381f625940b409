"""Lower bounds of steps: bytes and operations of two real model shapes, and the minimum time for them.

A step takes at least its bytes at the device's bandwidth, and its operations at the device's rate,
so the larger of the two times is the floor. Weights are read once per step, keys and values once
per row; activations, which stay in caches, and everything between matrix products are left out. A
multiply-add counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

FAMILY = "qwen2_5_vl"
IMAGE_TOKEN = 151655
PATCH, MERGE = 14, 2
PATCH_VALUES = 3 * 2 * PATCH * PATCH
WINDOW_PATCHES = 64
BYTES_A_VALUE = 2
BYTES_A_WEIGHT = {"int8": 1 + 2 / 128, "int4": 0.5 + 2 / 32}
"""Of quantized weights, scales included; the head is int8 in both cases."""


class Device(NamedTuple):
    """A device by its specification: bytes per second, and bfloat16 operations per second of a large product."""

    name: str
    bandwidth: float
    rate: float


DEVICES = (Device("H100", 3.35e12, 790e12), Device("H200", 4.8e12, 790e12))


@dataclass(frozen=True)
class Cost:
    """Bytes and operations of one step."""

    moved: float
    operations: float

    def least_ms(self, device: Device) -> float:
        """Return the minimum milliseconds on a device with these rates."""
        return 1e3 * max(self.moved / device.bandwidth, self.operations / device.rate)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's two parts."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    depth: int = 32
    vision_hidden: int = 1280
    vision_inner: int = 3420
    vision_heads: int = 16

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def full_blocks(self) -> list[int]:
        """Blocks of the vision tower with full attention instead of windows."""
        return [at for at in (7, 15, 23, 31) if at < self.depth]

    @property
    def language_linears(self) -> int:
        """Number of weights in the linear layers of the language model, without its head."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def vision_linears(self) -> int:
        """Number of weights in the linear layers of the vision tower's blocks."""
        block = 4 * self.vision_hidden**2 + 3 * self.vision_hidden * self.vision_inner
        return self.depth * block

    @property
    def merger_linears(self) -> int:
        """Number of weights in the merger, which combines four patches to a token."""
        merged = MERGE**2 * self.vision_hidden
        return merged * (merged + self.hidden)

    @property
    def kv_values(self) -> int:
        """KV cache values per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def decode(
        self, rows: int, context: int, *, bytes_a_value: int = BYTES_A_VALUE, weights: str = "auto"
    ) -> Cost:
        """Return the cost of a decode step with `rows` rows and `context` tokens each."""
        head = self.hidden * self.vocab
        moved = self.language_linears * BYTES_A_WEIGHT.get(weights, bytes_a_value)
        moved += head * (bytes_a_value if weights == "auto" else BYTES_A_WEIGHT["int8"])
        moved += rows * context * self.kv_values * bytes_a_value
        attending = 4 * self.layers * self.hidden * rows * context
        operations = 2 * (self.language_linears + head) * rows + attending
        return Cost(moved, operations)

    def prefill(self, first: int, rows: int, *, bytes_a_value: int = BYTES_A_VALUE) -> Cost:
        """Return the cost of a chunk of `rows` tokens after `first` tokens, which yields one token."""
        head = self.hidden * self.vocab
        values = self.language_linears + head + (first + rows) * self.kv_values
        seen = rows * first + rows * (rows + 1) / 2
        attending = 4 * self.layers * self.hidden * seen
        return Cost(values * bytes_a_value, 2 * self.language_linears * rows + attending + 2 * head)

    def encode(self, patches: int, images: int, *, bytes_a_value: int = BYTES_A_VALUE) -> Cost:
        """Return the cost of encoding `images` images of `patches` patches each."""
        full = len(self.full_blocks)
        seen = full * patches * patches + (self.depth - full) * patches * WINDOW_PATCHES
        embedding = PATCH_VALUES * self.vision_hidden
        operations = 2.0 * (self.vision_linears + embedding) * patches
        operations += 2 * self.merger_linears * patches / MERGE**2
        operations += 4 * self.vision_hidden * seen
        values = self.vision_linears + self.merger_linears + embedding
        return Cost(values * bytes_a_value, operations * images)

    def config(self) -> dict[str, Any]:
        half, first = self.head_dim // 2, self.head_dim // 8
        second = (half - first) // 2
        text = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [first, second, half - first - second],
            },
        }
        vision = {
            "depth": self.depth,
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_inner,
            "num_heads": self.vision_heads,
            "out_hidden_size": self.hidden,
            "patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": self.full_blocks,
        }
        return {
            "model_type": FAMILY,
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": self.tied,
            "image_token_id": min(IMAGE_TOKEN, self.vocab - 1),
        }


SHAPES = {
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "nano": Shape(
        64, 96, 2, 4, 2, 384, tied=True, depth=2, vision_hidden=32, vision_inner=48, vision_heads=2
    ),
}

IMAGES = {"720p": (1280, 720), "1080p": (1920, 1080), "2K": (2560, 1440)}
TURNS = (1, 4, 8)
FEW_DECODES = [(1, 1024), (8, 1024), (64, 1024), (32, 8192)]
DECODES = [(rows, 1024) for rows in (1, 2, 4, 8, 16, 32, 64, 128)] + [
    (rows, 8192) for rows in (1, 8, 32)
]
QUANTIZED_DECODES = [(rows, 1024) for rows in (1, 8, 64, 128)]
PREFILLS = [(0, 2048), (0, 8192), (8192, 2048)]


def grid_of(size: tuple[int, int]) -> tuple[int, int, int]:
    """Return the patch grid of an image of this size, resized to whole tokens."""
    unit = PATCH * MERGE
    wide, high = (MERGE * max(1, round(side / unit)) for side in size)
    return 1, high, wide


def patches_of(size: tuple[int, int]) -> int:
    """Return the number of patches of an image of this size."""
    _, high, wide = grid_of(size)
    return high * wide
