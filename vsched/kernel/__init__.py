"""The kernel: a pure, deterministic state machine that turns events into commands.

It imports neither clocks, randomness, sockets nor tensors. `Scheduler.handle(event, now_ns)` is the whole interface.
"""

from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerLimits"]
