"""From image references to items of a request: fetch, check, decode, process, keep.

`MediaPipeline.prepare` is the way in. Everything that a client can send is bounded here, before work is done for it.
"""

from vsched.media.embeddings import BoundedImage, EmbeddedImage, ImageReference, NamedImage
from vsched.media.measure import refuse_images
from vsched.media.pipeline import MediaPipeline, PreparedRequest, PrepareTimings, Prompt
from vsched.media.pixels import PixelLease, PixelStatistics, PixelStore
from vsched.media.settings import MediaSettings

__all__ = [
    "BoundedImage",
    "EmbeddedImage",
    "ImageReference",
    "MediaPipeline",
    "MediaSettings",
    "NamedImage",
    "PixelLease",
    "PixelStatistics",
    "PixelStore",
    "PrepareTimings",
    "PreparedRequest",
    "Prompt",
    "refuse_images",
]
