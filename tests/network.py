"""A network for one host: a Linux namespace at the other end of a virtual cable. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "10.213.97"
NEAR, FAR = f"{PREFIX}.1", f"{PREFIX}.2"


def why_no_network() -> str:
    """Return the reason why this process cannot create networks, or an empty string."""
    if os.geteuid():
        return "network namespaces take root"
    if not shutil.which("ip"):
        return "there is no command `ip`"
    try:
        with network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"this system lets nobody make network namespaces: {error.stderr.decode()}"


class Network:
    """A network with one address, `FAR`, which is reached from this one.

    Attributes:
        within: Prefix of commands that run in it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.within = ("ip", "netns", "exec", name)

    def cut(self) -> None:
        """Drop everything silently, in both directions."""
        _ip("-n", self._name, "link", "set", self._name, "down")

    def mend(self) -> None:
        """Let everything through again."""
        _ip("-n", self._name, "link", "set", self._name, "up")


@contextmanager
def network() -> Iterator[Network]:
    """Yield a new network."""
    name = f"vs{os.getpid()}"
    near = f"{name}n"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", name, "netns", name)
        _ip("addr", "add", f"{NEAR}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{FAR}/30", "dev", name)
        _ip("-n", name, "link", "set", name, "up")
        try:
            yield Network(name)
        finally:
            _ip("link", "del", near)  # at once; with its namespace it would vanish some time later
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
