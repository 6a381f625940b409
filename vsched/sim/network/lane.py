"""One direction of the link between an engine and another host: how long bytes take.

All that goes to a host shares its link: a frame leaves when those before it have, in as much time as its bytes take,
and arrives a latency later. Nothing is lost, for TCP sends again what is: what a cut meets comes when that is over.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from vsched.aio.hosts.stream import WINDOW_BYTES
from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import HostCut, SlowHostLink
from vsched.sim.loop.virtual_loop import SECOND_NS, VirtualLoop


class HostLinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the links between an engine and other hosts are like, in both directions.

    The bytes of a frame take their time at `bytes_per_s`, and then `latency_ns`, and a time drawn from an exponential
    distribution whose mean is `jitter_ns`. Of one start of a worker group, `window_bytes` are under way at most.
    """

    latency_ns: Annotated[int, msgspec.Meta(ge=0)] = 200_000
    jitter_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] = 125e6
    window_bytes: Annotated[int, msgspec.Meta(ge=2)] = WINDOW_BYTES


class Lane:
    """One direction of the link to a host.

    Attributes:
        bytes_sent: Of all frames so far.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Injector,
        host: str,
        profile: HostLinkProfile,
    ) -> None:
        self.bytes_sent = 0
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self._profile = profile
        self._slow = [one for one in faults.of(SlowHostLink) if one.host == host]
        self._cuts = [one for one in faults.of(HostCut) if one.host == host]
        self._cuts.sort(key=lambda fault: fault.at_ns)
        self._free_ns = 0

    def arrival_ns(self, size: int) -> int:
        """Return when a frame of this size arrives that is sent now; those that are sent later leave after it."""
        self.bytes_sent += size
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
