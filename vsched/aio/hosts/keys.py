"""CURVE keys of the links between engine and hosts, derived from a shared secret.

The secret is a file (`vsched host --make-key`), or is generated for one run and passed to the hosts that Ray starts.
Both key pairs are derived from it, so each side knows the other's public key and accepts no other peer. CURVE makes
session keys for each connection, so recorded traffic stays unreadable if the secret leaks later.
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
    """One side's key pair and the other side's public key, in ZeroMQ's Z85 format."""

    public: bytes
    secret: bytes
    peer: bytes


def curve_keys(shared: bytes, side: Literal["engine", "host"]) -> CurveKeys:
    """Return the keys of one side of the link.

    Raises:
        ConfigError: When ZeroMQ was built without CURVE.
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
    """Write a new secret to a file that only its owner can read.

    Raises:
        ConfigError: When the file exists or cannot be written.
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
    """Return the secret in the file at `path`; `key` is the configuration key for error messages.

    Raises:
        ConfigError: When the file cannot be read, contains no key, or is readable by others.
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
