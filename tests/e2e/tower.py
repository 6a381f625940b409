"""The vision tower on the client's side, and embeddings as a client sends them."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors.numpy import save

from vsched.media import MediaReference
from vsched.types import ModelInfo
from vsched.worker.contract import Arrays, EncodeJob, EncodeWorker, Preprocessor, WorkerSettings
from vsched_workers.families.qwen_image import grid_of
from vsched_workers.plugin import plugin


@dataclass
class Tower:
    """Encodes as the server does."""

    info: ModelInfo
    preprocessor: Preprocessor
    worker: EncodeWorker
    made: dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str) -> Tower:
        info = plugin.inspect(path, dtype="auto", item_tokens_max=0)
        worker = plugin.load_encoder(info, WorkerSettings(), lambda _what, _fraction: None)
        return cls(info, plugin.load_preprocessor(info), worker)

    def encode(self, image: Image.Image) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return float32 rows, [tokens, levels * hidden size], and the grid."""
        if id(image) not in self.made:
            plan = self.preprocessor.plan_image(*image.size)
            arrays = self.preprocessor.process_image(image)
            rows = self.encode_item(arrays, plan.tokens, plan.metadata)
            self.made[id(image)] = rows, np.array(grid_of(plan.metadata))
        return self.made[id(image)]

    def encode_item(self, arrays: Arrays, tokens: int, metadata: bytes) -> npt.NDArray[Any]:
        """Return the float32 rows of an image or a frame group."""
        page = np.zeros((1, tokens, self.info.embedding_row_bytes), np.uint8)
        self.worker.encode([EncodeJob(b"", tokens, arrays, metadata, [0])], page)
        rows: npt.NDArray[Any] = page[0].view(np.float32)
        return rows

    def embed(self, image: Image.Image) -> MediaReference:
        rows, grid = self.encode(image)
        return packed(embeds=rows, grid_thw=grid)


def packed(**tensors: npt.NDArray[Any]) -> MediaReference:
    return MediaReference(base64.b64encode(save(tensors)).decode(), is_embedded=True)
