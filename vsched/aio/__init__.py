"""The asyncio shell: it carries the kernel's commands out and brings it events."""

from vsched.aio.queue import FifoQueue

__all__ = ["FifoQueue"]
