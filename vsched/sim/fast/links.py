"""Links to other hosts: transfer times of decisions, their inputs and their results.

All traffic to a host shares its link: bytes leave one after another at the rate of the link, and
arrive in order after the latency. Pixels are sent ahead of an encode batch, and the embeddings
covered by its chunks ahead of a generate step; the embeddings from a batch come before its result.
Decisions and results themselves count as zero bytes. With Ray each replica has its own link,
because the replicas that will share a node are not known in advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from vsched.config import Config
from vsched.config.sections import OWN_HOST, RAY_HOST
from vsched.kernel.decisions import ChunkPlan, Decision, EncodeDecision
from vsched.sim.network.lane import HostLinkProfile
from vsched.types import ModelInfo


class LinkWay:
    """One direction of the link to a host.

    Attributes:
        bytes: Total bytes sent.
        busy_ns: Total time spent sending.
    """

    def __init__(self, profile: HostLinkProfile, rng: Random) -> None:
        self.bytes = 0
        self.busy_ns = 0
        self._profile = profile
        self._rng = rng
        self._free_ns = self._latest_ns = 0
        # A transfer larger than the window waits for an acknowledgement after each window.
        window_ns = profile.window_bytes * 1e9 / profile.bytes_per_s
        self._wait_ns = max(2 * profile.latency_ns - window_ns, 0.0)

    def arrival_ns(self, size: int, now_ns: int) -> int:
        """Return when `size` bytes sent now arrive."""
        profile, leaves_ns = self._profile, max(now_ns, self._free_ns)
        if size:
            took_ns = size * 1e9 / profile.bytes_per_s
            took_ns += (size - 1) // profile.window_bytes * self._wait_ns
            self.bytes += size
            self.busy_ns += int(took_ns)
            leaves_ns = self._free_ns = leaves_ns + int(took_ns)
        arrives_ns = leaves_ns + profile.latency_ns
        if profile.jitter_ns:
            arrives_ns += int(self._rng.expovariate(1 / profile.jitter_ns))
        self._latest_ns = max(self._latest_ns, arrives_ns)
        return self._latest_ns


class GroupLink:
    """The link of a group on another host; groups on one host share the directions `there` and `back`."""

    def __init__(self, *, there: LinkWay, back: LinkWay, row_bytes: int) -> None:
        self.there = there
        self.back = back
        self._row_bytes = row_bytes

    def decision_ns(self, decision: Decision, now_ns: int) -> int:
        """Return when a decision and all its inputs have arrived."""
        if isinstance(decision, EncodeDecision):
            size = sum(task.extent.size for task in decision.tasks)
        else:
            size = sum(map(_covered_rows, decision.chunks)) * self._row_bytes
        return self.there.arrival_ns(size, now_ns)

    def result_ns(self, decision: Decision, now_ns: int) -> int:
        """Return when the engine receives the result of a step that ended now."""
        size = 0
        if isinstance(decision, EncodeDecision):
            size = sum(task.tokens for task in decision.tasks) * self._row_bytes
        return self.back.arrival_ns(size, now_ns)


def _covered_rows(chunk: ChunkPlan) -> int:
    """Return the number of embedding rows in a chunk."""
    return sum(
        max(min(chunk.stop, item.offset + item.tokens) - max(chunk.start, item.offset), 0)
        for item in chunk.items
    )


class Links:
    """The links of a simulation.

    Attributes:
        groups: The link of each group on another host, by name.
    """

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        profile: HostLinkProfile,
        *,
        encoders: Sequence[str],
        generators: Sequence[str],
        rng: Random,
    ) -> None:
        hosts = hosts_of(config, encoders, generators)
        ways = {
            host: (LinkWay(profile, rng), LinkWay(profile, rng))
            for host in dict.fromkeys(hosts.values())
            if host != OWN_HOST
        }
        self._ways = [way for both in ways.values() for way in both]
        together = config.placement == "together"
        self.groups = {
            group: GroupLink(
                there=ways[host][0],
                back=ways[host][1],
                # With both stages in one process, rows stay there.
                row_bytes=0 if together else info.embedding_row_bytes,
            )
            for group, host in hosts.items()
            if host != OWN_HOST
        }

    @property
    def bytes(self) -> int:
        """Total bytes to and from other hosts."""
        return sum(way.bytes for way in self._ways)

    @property
    def busiest_ns(self) -> int:
        """Sending time of the busiest direction."""
        return max((way.busy_ns for way in self._ways), default=0)


def hosts_of(
    config: Config, encoders: Sequence[str], generators: Sequence[str]
) -> Mapping[str, str]:
    """Return the initial host of each group."""
    hosts: dict[str, str] = {}
    for stage, groups in (("encode", encoders), ("generate", generators)):
        placed = "generate" if config.placement == "together" else stage
        for replica, group in enumerate(groups):
            host = config.cluster.first_host(placed, replica)
            hosts[group] = f"{RAY_HOST}-{placed}-{replica}" if host == RAY_HOST else host
    return hosts
