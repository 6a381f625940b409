"""Configuration keys of other hosts and of Ray."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vsched.config.section import Section
from vsched.errors import ConfigError, ConfigProblems, limit_message

OWN_HOST = "local"
"""Name of the engine's own host in lists of hosts."""
RAY_HOST = "ray"
"""Host name of replicas that Ray places."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s]+):\d{1,5}")
_RAY_ADDRESS = re.compile(r"auto|(\[[0-9a-fA-F:.]+\]|[^:/\s]+):\d{1,5}")


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Other hosts for ranks; see docs/hosts.md."""

    hosts: Annotated[
        dict[str, str],
        Meta(
            description='Addresses of the hosts that run `vsched host`, by name: `{far = "tcp://10.0.0.2:7700"}`. '
            "`local` is the name of this host."
        ),
    ] = msgspec.field(default_factory=dict)
    key_file: Annotated[
        str,
        Meta(
            description="File with the secret shared by the engine and the hosts; `vsched host --make-key` creates "
            "one."
        ),
    ] = ""
    encode: Annotated[
        list[str],
        Meta(
            description="Hosts for the replicas of the encode stage, in turn; empty for this host, or for Ray if "
            "`ray` is set."
        ),
    ] = msgspec.field(default_factory=list)
    generate: Annotated[
        list[str],
        Meta(
            description="Hosts for the replicas of the generate stage, in turn; empty for this host, or for Ray if "
            '`ray` is set. With `placement = "together"`, for the replicas of both stages.'
        ),
    ] = msgspec.field(default_factory=list)
    connect_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time to wait for a host before the next one in the list is tried.",
        ),
    ] = 10.0
    ray: Annotated[
        str,
        Meta(
            description="Address of the Ray cluster that places replicas, HOST:PORT, or `auto` for the cluster of "
            "this host; empty for none. Needs `pip install 'vsched[ray]'`."
        ),
    ] = ""
    ray_group: Annotated[
        str,
        Meta(
            description="Name of an existing Ray placement group, whose bundles the replicas take in turn, those of "
            "the encode stage first; empty to create one."
        ),
    ] = ""
    ray_strategy: Annotated[
        Literal["pack", "spread", "strict-pack", "strict-spread"],
        Meta(description="Ray's placement strategy for the bundles of replicas."),
    ] = "pack"
    encode_resources: Annotated[
        dict[str, float],
        Meta(
            description="Ray resources of a replica of the encode stage: `{CPU = 4, fast_cpu = 1}`. By default one "
            "CPU per thread of its ranks, or per rank if `threads` is not set, and one GPU per rank on a "
            "GPU."
        ),
    ] = msgspec.field(default_factory=dict)
    generate_resources: Annotated[
        dict[str, float],
        Meta(
            description='Ray resources of a replica of the generate stage; with `placement = "together"`, of both '
            "stages."
        ),
    ] = msgspec.field(default_factory=dict)

    def hosts_of(self, stage: str) -> list[str]:
        """Hosts on which the replicas of a stage start, in turn; for stages in one process, use `generate`."""
        names = self.encode if stage == "encode" else self.generate
        return names or [RAY_HOST if self.ray else OWN_HOST]

    def first_host(self, stage: str, replica: int) -> str:
        """Host on which a replica starts first."""
        names = self.hosts_of(stage)
        return names[replica % len(names)]

    @property
    def used(self) -> set[str]:
        """Names of all hosts on which replicas may start."""
        return {*self.hosts_of("encode"), *self.hosts_of("generate")}

    @property
    def elsewhere(self) -> bool:
        """True if ranks run on other hosts."""
        return not self.used <= {OWN_HOST}


def check_cluster(cluster: ClusterConfig, *, together: bool, adapters: int) -> None:
    """Reject a cluster section on whose hosts no rank can start.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    problems = ConfigProblems()
    for name, address in cluster.hosts.items():
        if name == OWN_HOST:
            problems.add(f"cluster.hosts: {OWN_HOST!r} is this host. Remedy: choose another name")
        if name == RAY_HOST:
            problems.add(f"cluster.hosts: {RAY_HOST!r} is Ray's. Remedy: choose another name")
        if not _ADDRESS.fullmatch(address):
            what = f"cluster.hosts.{name}: no address"
            remedy = "write the address of `vsched host --listen` on that host"
            problems.add(
                limit_message(what, value=repr(address), limit="tcp://HOST:PORT", remedy=remedy)
            )
    known = [*cluster.hosts, OWN_HOST, *([RAY_HOST] if cluster.ray else [])]
    for key, names in (("encode", cluster.encode), ("generate", cluster.generate)):
        for name in names:
            if name not in known:
                problems.add(
                    f"cluster.{key}: there is no host {name!r}. Remedy: name one of {', '.join(known)}"
                )
    with problems.collected():
        _check_ray(cluster)
    with problems.collected():
        _check_use(cluster, together=together, adapters=adapters)
    problems.tell()


def _check_ray(cluster: ClusterConfig) -> None:
    if cluster.ray and not _RAY_ADDRESS.fullmatch(cluster.ray):
        raise ConfigError(
            limit_message(
                "cluster.ray: no address of a Ray cluster",
                value=repr(cluster.ray),
                limit="auto or HOST:PORT",
                remedy="write the address that `ray start --head` printed for its nodes",
            )
        )
    for key in ("encode", "generate"):
        names = getattr(cluster, key)
        if RAY_HOST in names and {*names} != {RAY_HOST}:
            raise ConfigError(
                f"cluster.{key}: {', '.join(names)}: Ray places all replicas of a stage, or none. "
                f'Remedy: ["{RAY_HOST}"], or hosts alone'
            )
    for key in ("encode_resources", "generate_resources"):
        for name, amount in getattr(cluster, key).items():
            if amount <= 0:
                raise ConfigError(
                    limit_message(
                        f"cluster.{key}.{name}: no amount of a resource",
                        value=amount,
                        limit="above 0",
                        remedy="leave out resources that replicas do not need",
                    )
                )


def _check_use(cluster: ClusterConfig, *, together: bool, adapters: int) -> None:
    if not cluster.elsewhere:
        return
    if not cluster.key_file and not cluster.used <= {OWN_HOST, RAY_HOST}:
        raise ConfigError(
            "cluster.key_file: not set, and hosts need a key. Remedy: create one with "
            "`vsched host --make-key FILE`, and copy it to every host"
        )
    if together and cluster.encode:
        raise ConfigError(
            "cluster.encode: with placement = together both stages start where the generate stage does. Remedy: "
            "list the hosts only in cluster.generate"
        )
    if adapters:
        raise ConfigError(
            limit_message(
                "adapters.count_max: ranks on other hosts do not have the files of adapters",
                value=adapters,
                limit="0 with cluster.encode, cluster.generate or cluster.ray",
                remedy="serve adapters on one host",
            )
        )
