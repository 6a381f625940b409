"""The way of a simulated request into the scheduler: limits, room for pixels, and threads that process images.

It does what `vsched.media.pipeline` does, with times from a cost model. Pixels stay until their request has ended, so
under bursts the arena's pixel region bounds how many requests are in at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vsched.config import Config
from vsched.sim.cost.model import CostModel
from vsched.sim.workload.requests import Arrival, RequestMaker


class IncomingRequest(NamedTuple):
    """A request on its way: its number at the front door, when it was sent and came in, and its pixels' bytes."""

    arrival: Arrival
    knock: int
    sent_ns: int
    entered_ns: int
    pixels: Mapping[str, int]


class ImageJob:
    """An image that a thread processes; an end that was announced with an earlier `incarnation` is void."""

    __slots__ = ("incarnation", "left", "need_ns", "prepared")
    process = "engine"

    def __init__(self, prepared: IncomingRequest, need_ns: int, left: list[int]) -> None:
        """Prepare one of a request's jobs, which share `left`: the number of those that are not done."""
        self.incarnation = 0
        self.prepared = prepared
        self.need_ns = need_ns
        self.left = left


class Ingress:
    """Prepares requests, and tells when each will be ready, or why it is refused.

    Attributes:
        preparing: Requests that wait for room for their pixels, or whose images are being processed.
    """

    def __init__(
        self,
        config: Config,
        cost: CostModel,
        maker: RequestMaker,
        *,
        on_job: Callable[[ImageJob, int, int], None],
        on_ready: Callable[[int, IncomingRequest], None],
        on_refused: Callable[[IncomingRequest, str, int], None],
    ) -> None:
        """Prepare to prepare; `on_job` is handed jobs that begin, with their ends and the time, for `done`."""
        self.preparing = 0
        self._media = config.media
        self._takes_images = config.encode.replicas > 0
        self._prepare_ns = int(config.media.prepare_s * 1e9)
        self._size = self._free = config.arena.pixel_bytes
        self._held: dict[str, int] = {}
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: deque[IncomingRequest] = deque()
        self._threads_free = config.media.threads
        self._jobs: deque[ImageJob] = deque()
        self._cost = cost
        self._maker = maker
        self._on_job = on_job
        self._on_ready = on_ready
        self._on_refused = on_refused

    def take(self, arrival: Arrival, now_ns: int, *, knock: int, sent_ns: int) -> None:
        """A request, sent at a time before, was let in."""
        images = arrival.images
        bytes_of = self._maker.pixel_bytes
        prepared = IncomingRequest(
            arrival,
            knock,
            sent_ns,
            now_ns,
            {arrival.key_of(image): bytes_of(image) for image in images},
        )
        refused = ""
        if images and not self._takes_images:
            refused = "images_not_taken"
        elif len(images) > self._media.images_max:
            refused = "too_many_images"
        elif self.preparing >= self._media.preparing_max:
            refused = "queue_full"
        elif images and sum(prepared.pixels.values()) > self._size:
            refused = "pixels_exceeded"
        if refused:
            self._on_refused(prepared, refused, now_ns)
            return
        self.preparing += 1
        if not images:
            self._finish(prepared, now_ns)
        elif self._waiting or not self._process(prepared, now_ns):
            self._waiting.append(prepared)

    def submitted(self) -> None:
        """A request that was ready went on to the scheduler."""
        self.preparing -= 1

    def release(self, pixels: Mapping[str, int], now_ns: int) -> None:
        """A request ended: others may take the room of its pixels."""
        for key, size in pixels.items():
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._kept[key] = size
                self._kept_bytes += size
        while self._waiting:
            first = self._waiting[0]
            if now_ns - first.entered_ns > self._prepare_ns:
                self.preparing -= 1
                self._on_refused(first, "prepare_timeout", now_ns)
            elif not self._process(first, now_ns):
                return
            self._waiting.popleft()

    def _process(self, prepared: IncomingRequest, now_ns: int) -> bool:
        """Give a request its room and process its images; return False when there is no room yet."""
        pixels, kept = prepared.pixels, self._kept
        absent = [key for key in pixels if key not in self._held and key not in kept]
        needed = sum(pixels[key] for key in absent)
        own = [key for key in pixels if key in kept]
        if needed > self._free + self._kept_bytes - sum(pixels[key] for key in own):
            return False
        for key in own:
            self._kept_bytes -= kept.pop(key)
        while needed > self._free:
            _, size = kept.popitem(last=False)
            self._kept_bytes -= size
            self._free += size
        self._free -= needed
        for key in pixels:
            self._held[key] = self._held.get(key, 0) + 1
        tokens = {prepared.arrival.key_of(image): image.tokens for image in prepared.arrival.images}
        if not absent:
            self._finish(prepared, now_ns)
            return True
        left = [len(absent)]
        for key in absent:
            self._jobs.append(ImageJob(prepared, int(self._cost.image_ns(tokens[key])), left))
        self._begin(now_ns)
        return True

    def _begin(self, now_ns: int) -> None:
        while self._jobs and self._threads_free:
            self._threads_free -= 1
            job = self._jobs.popleft()
            self._on_job(job, now_ns + job.need_ns, now_ns)

    def done(self, job: ImageJob, now_ns: int) -> None:
        """A thread is done with an image: it takes the next, and the request of the last one is ready."""
        self._threads_free += 1
        job.left[0] -= 1
        if not job.left[0]:
            self._finish(job.prepared, now_ns)
        self._begin(now_ns)

    def _finish(self, prepared: IncomingRequest, now_ns: int) -> None:
        """The images of a request are there."""
        host = self._cost.host
        took_ns = host.request_ns + host.token_ns * prepared.arrival.prompt_tokens
        self._on_ready(now_ns + int(took_ns), prepared)
