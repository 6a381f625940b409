"""Simulated request intake: limits, pixel memory, and threads that process images.

Models `vsched.media.pipeline`, with times from a cost model. Pixels are held until their request
has ended, so in bursts the pixel region of the arena limits the number of requests in the engine.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vsched.config import Config
from vsched.sim.cost.model import CostModel
from vsched.sim.fast.groups import SharedWork
from vsched.sim.workload.requests import Arrival, Image, RequestMaker, Video, images_of


class IncomingRequest(NamedTuple):
    """A request in preparation: its arrival number, when it was sent and admitted, and its pixel bytes by image."""

    arrival: Arrival
    arrival_id: int
    sent_ns: int
    entered_ns: int
    pixels: Mapping[str, int]


class ImageJob(SharedWork):
    """An image or a video being processed by a thread."""

    process = "engine"

    def __init__(
        self, prepared: IncomingRequest, need_ns: int, left: list[int], threads: _Threads
    ) -> None:
        """Create a job of a request; `left` counts the unfinished jobs and is shared by all of them."""
        self.prepared = prepared
        self.need_ns = need_ns
        self.left = left
        self.threads = threads


class _Threads:
    """A thread pool: its free threads and waiting jobs."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.waiting: deque[ImageJob] = deque()


class Ingress:
    """Prepares requests and reports when each is ready or why it was refused.

    Attributes:
        preparing: Number of requests that wait for pixel memory or have images in processing.
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
        """Initialize; each started job is passed to `on_job` with its end and the time; `done` ends it."""
        self.preparing = 0
        self._media = config.media
        self._takes_images = config.encode.replicas > 0
        self._prepare_ns = int(config.media.prepare_s * 1e9)
        self._size = self._free = config.arena.pixel_bytes
        self._held: dict[str, int] = {}
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: deque[IncomingRequest] = deque()
        self._image_threads = _Threads(config.media.threads)
        self._video_threads = _Threads(config.media.threads)
        self._cost = cost
        self._maker = maker
        self._on_job = on_job
        self._on_ready = on_ready
        self._on_refused = on_refused

    def prepare_request(
        self, arrival: Arrival, now_ns: int, *, arrival_id: int, sent_ns: int
    ) -> None:
        """Start to prepare an admitted request, sent at an earlier time."""
        images, media = arrival.images, arrival.media
        bytes_of = self._maker.pixel_bytes
        prepared = IncomingRequest(
            arrival,
            arrival_id,
            sent_ns,
            now_ns,
            {arrival.key_of(image): bytes_of(image) for image in images},
        )
        refused = ""
        if images and not self._takes_images:
            refused = "images_not_taken"
        elif sum(type(part) is Video for part in media) > self._media.videos_max:
            refused = "too_many_videos"
        elif len(media) > self._media.images_max:
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
            self._schedule_ready(prepared, now_ns)
        elif self._waiting or not self._process(prepared, now_ns):
            self._waiting.append(prepared)

    def submitted(self) -> None:
        """Count a ready request as passed to the scheduler."""
        self.preparing -= 1

    def release(self, pixels: Mapping[str, int], now_ns: int) -> None:
        """Release the pixels of an ended request, and start waiting requests."""
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
        """Allocate pixel memory and process the images; return False if there is not enough memory yet."""
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
        jobs = self._jobs_of(prepared, set(absent))
        for job in jobs:
            job.threads.waiting.append(job)
            self._start_jobs(job.threads, now_ns)
        if not jobs:
            self._schedule_ready(prepared, now_ns)
        return True

    def _jobs_of(self, prepared: IncomingRequest, absent: set[str]) -> list[ImageJob]:
        """Return a job for each image that is not in memory, and for each video of which a part is not."""
        arrival, left, jobs = prepared.arrival, [0], []
        for part in arrival.media:
            images = images_of(part)
            keys = {arrival.key_of(image) for image in images}
            if keys & absent:
                absent -= keys
                need_ns = sum(int(self._cost.image_ns(image.tokens)) for image in images)
                threads = self._image_threads if type(part) is Image else self._video_threads
                jobs.append(ImageJob(prepared, need_ns, left, threads))
        left[0] = len(jobs)
        return jobs

    def _start_jobs(self, threads: _Threads, now_ns: int) -> None:
        while threads.waiting and threads.free:
            threads.free -= 1
            job = threads.waiting.popleft()
            self._on_job(job, now_ns + job.need_ns, now_ns)

    def finish_job(self, job: ImageJob, now_ns: int) -> None:
        """Finish an image job: start the next one, and finish the request after its last job."""
        job.threads.free += 1
        job.left[0] -= 1
        if not job.left[0]:
            self._schedule_ready(job.prepared, now_ns)
        self._start_jobs(job.threads, now_ns)

    def _schedule_ready(self, prepared: IncomingRequest, now_ns: int) -> None:
        """Schedule the ready time of a request whose images are processed."""
        host = self._cost.host
        took_ns = host.request_ns + host.token_ns * prepared.arrival.prompt_tokens
        self._on_ready(now_ns + int(took_ns), prepared)
