"""One direction of the link between an engine and another host: transfer times.

All traffic to a host shares its link: a frame is sent after the previous ones, takes time
proportional to its size, and arrives after the latency. Nothing is lost, since TCP retransmits:
data affected by a cut arrives when the cut ends.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from vsched.aio.hosts.link import WINDOW_BYTES
from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import HostCut, SlowHostLink
from vsched.sim.loop.virtual_loop import SECOND_NS, VirtualLoop


class HostLinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of the links between an engine and other hosts, in both directions.

    A frame is sent at `bytes_per_s`, and arrives after `latency_ns` plus an exponentially
    distributed time with mean `jitter_ns`. At most `window_bytes` are in flight per start of a
    worker group.
    """

    latency_ns: Annotated[int, msgspec.Meta(ge=0)] = 200_000
    jitter_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] = 125e6
    window_bytes: Annotated[int, msgspec.Meta(ge=2)] = WINDOW_BYTES


class Lane:
    """One direction of the link to a host."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Injector,
        host: str,
        profile: HostLinkProfile,
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self._profile = profile
        self._slow = [one for one in faults.of(SlowHostLink) if one.host == host]
        self._cuts = [one for one in faults.of(HostCut) if one.host == host]
        self._cuts.sort(key=lambda fault: fault.at_ns)
        self._free_ns = 0

    def arrival_ns(self, size: int) -> int:
        """Return when a frame of this size sent now arrives; later frames are sent after it."""
        now_ns, profile, factor = self._loop.now_ns(), self._profile, 1.0
        for slow in self._slow:
            if slow.at_ns <= now_ns < slow.end_ns:
                factor *= slow.factor
                self._faults.note(slow)
        leaves_ns = max(now_ns, self._free_ns) + round(
            factor * size * SECOND_NS / profile.bytes_per_s
        )
        way_ns = round(factor * profile.latency_ns)
        if profile.jitter_ns:
            way_ns += round(self._rng.expovariate(1 / profile.jitter_ns))
        for cut in self._cuts:
            if cut.at_ns <= leaves_ns + way_ns and now_ns < cut.end_ns:
                leaves_ns = max(leaves_ns, cut.end_ns)
                self._faults.note(cut)
        self._free_ns = leaves_ns
        return leaves_ns + way_ns
