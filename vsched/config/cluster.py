"""The keys of other hosts."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.config.section import Section
from vsched.errors import ConfigError, ConfigProblems, limit_message

OWN_HOST = "local"
"""What the engine's own host is called where hosts are listed."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s]+):\d{1,5}")


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Other hosts that ranks run on; see docs/hosts.md."""

    hosts: Annotated[
        dict[str, str],
        Meta(
            description="Addresses of the hosts that run `vsched host`, by name: "
            '`{far = "tcp://10.0.0.2:7700"}`. `local` is the name of this one.'
        ),
    ] = msgspec.field(default_factory=dict)
    key_file: Annotated[
        str,
        Meta(
            description="File with the secret that engine and hosts share; `vsched host --make-key` makes one."
        ),
    ] = ""
    encode: Annotated[
        list[str],
        Meta(
            description="Hosts that the replicas of the encode stage start on, in turn; empty for this one."
        ),
    ] = msgspec.field(default_factory=list)
    generate: Annotated[
        list[str],
        Meta(
            description="Hosts that the replicas of the generate stage start on, in turn; empty for this one. With "
            '`placement = "together"`, those of both stages.'
        ),
    ] = msgspec.field(default_factory=list)
    connect_s: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a host may take to answer until the next of the list has its turn.",
        ),
    ] = 10.0

    def first_host(self, stage: str, replica: int) -> str:
        """Return where a replica of a stage starts first; with both stages in one process, ask for `generate`."""
        names = self.encode if stage == "encode" else self.generate
        return names[replica % len(names)] if names else OWN_HOST

    @property
    def elsewhere(self) -> bool:
        """Whether ranks run on another host."""
        return not {*self.encode, *self.generate} <= {OWN_HOST}


def check_cluster(cluster: ClusterConfig, *, together: bool, adapters: int) -> None:
    """Refuse hosts that nothing can be started on.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    problems = ConfigProblems()
    for name, address in cluster.hosts.items():
        if name == OWN_HOST:
            problems.add(f"cluster.hosts: {OWN_HOST!r} is this host. Remedy: choose another name")
        if not _ADDRESS.fullmatch(address):
            what = f"cluster.hosts.{name}: no address"
            remedy = "write where `vsched host --listen` listens there"
            problems.add(
                limit_message(what, value=repr(address), limit="tcp://HOST:PORT", remedy=remedy)
            )
    known = [*cluster.hosts, OWN_HOST]
    for key, names in (("encode", cluster.encode), ("generate", cluster.generate)):
        for name in names:
            if name not in known:
                problems.add(
                    f"cluster.{key}: there is no host {name!r}. Remedy: name one of {', '.join(known)}"
                )
    with problems.collected():
        _check_use(cluster, together=together, adapters=adapters)
    problems.tell()


def _check_use(cluster: ClusterConfig, *, together: bool, adapters: int) -> None:
    if not cluster.elsewhere:
        return
    if not cluster.key_file:
        raise ConfigError(
            "cluster.key_file: not set, and nobody is trusted without a key. Remedy: make one with "
            "`vsched host --make-key FILE`, and copy it to every host"
        )
    if together and cluster.encode:
        raise ConfigError(
            "cluster.encode: with placement = together both stages start where the generate stage does. Remedy: "
            "list the hosts in cluster.generate alone"
        )
    if adapters:
        raise ConfigError(
            limit_message(
                "adapters.count_max: ranks on other hosts do not have the files of adapters",
                value=adapters,
                limit="0 with cluster.encode or cluster.generate",
                remedy="serve adapters on one host",
            )
        )
