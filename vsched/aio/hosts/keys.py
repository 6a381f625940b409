"""The keys of the links between hosts: CURVE, from one secret that both sides have, or made for one way between hosts.

The secret is a file (`vsched host --make-key`), or is made for one start and handed over by whoever starts the host.
Both sides' key pairs follow from it, so each knows the other's public key and takes nobody else; CURVE makes keys of
its own for each connection, so who learns the secret later cannot read what was sent before.
"""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import zmq
from zmq.utils import z85

from vsched.errors import ConfigError

SECRET_BYTES = 32
DOMAIN = b"vsched"


class CurveKeys(NamedTuple):
    """One side's pair of keys, and the other's public key, as ZeroMQ wants them."""

    public: bytes
    secret: bytes
    peer: bytes


class PlainKeys(NamedTuple):
    """A name and a password, sent as they are before anything else: nothing of that connection is encrypted.

    They are a pair of keys, the public one and the secret one: a host that was told the name can tell the password.
    """

    public: bytes
    secret: bytes

    @property
    def fit(self) -> bool:
        """Whether this is the password of that name."""
        try:
            return zmq.curve_public(self.secret) == self.public
        except (ValueError, zmq.ZMQError):
            return False


def curve_keys(shared: bytes, side: Literal["engine", "host"]) -> CurveKeys:
    """Return the keys of a side of the link.

    Raises:
        ConfigError: When this build of ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            "cluster: this build of ZeroMQ has no CURVE, and nothing is sent to other hosts in the clear. "
            "Remedy: install pyzmq from a wheel of PyPI, which has it"
        )
    other = "host" if side == "engine" else "engine"
    secret = _secret_of(shared, side)
    return CurveKeys(zmq.curve_public(secret), secret, zmq.curve_public(_secret_of(shared, other)))


def _secret_of(shared: bytes, side: str) -> bytes:
    return z85.encode(blake2b(side.encode(), key=shared, digest_size=32).digest())


def make_secret() -> bytes:
    """Return a new secret."""
    return secrets.token_bytes(SECRET_BYTES)


def write_key_file(path: Path) -> None:
    """Write a new secret, for nobody else to read.

    Raises:
        ConfigError: When there is such a file, or it cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: no key written: {error.strerror}. Remedy: name a new file"
        ) from (error)
    with os.fdopen(file, "w") as out:
        out.write(f"{make_secret().hex()}\n")


def read_key_file(path: str, *, key: str) -> bytes:
    """Return the secret of a file that `key` names.

    Raises:
        ConfigError: When it cannot be read, is no key, or others may read it.
    """
    remedy = "Remedy: make one with `vsched host --make-key FILE`, and copy it to every host"
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            shared = bytes.fromhex(file.read())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} is no key file: {error}. {remedy}") from error
    if len(shared) != SECRET_BYTES:
        raise ConfigError(
            f"{key}: {path!r} has {len(shared)} bytes, a key has {SECRET_BYTES}. {remedy}"
        )
    if mode & 0o077:
        raise ConfigError(f"{key}: others may read {path!r}. Remedy: chmod 600 {path}")
    return shared
