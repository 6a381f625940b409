"""From image references to the images of a request: fetch, check, decode, process, cache.

`MediaPipeline.prepare` is the entry point. All client input is limited here, before work is done for it.
"""

from vsched.media.measure import refuse_images
from vsched.media.pipeline import MediaPipeline, PreparedRequest, Prompt
from vsched.media.pixels import PixelStore
from vsched.media.references import ImageReference, MediaReference, scheme_of
from vsched.media.sources import frames_of

__all__ = [
    "ImageReference",
    "MediaPipeline",
    "MediaReference",
    "PixelStore",
    "PreparedRequest",
    "Prompt",
    "frames_of",
    "refuse_images",
    "scheme_of",
]
