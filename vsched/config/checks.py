"""Checks of values that are valid by themselves: malformed names, which would silently match nothing, and combinations.

Each check yields the problems that it finds, in lines that start with the path of a key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import msgspec

from vsched.config.sections import (
    OWN_HOST,
    RAY_HOST,
    ClusterConfig,
    Config,
    MediaConfig,
    config_keys,
)
from vsched.errors import ConfigError, limit_message
from vsched.plugins import convert_value
from vsched.worker.registry import check_worker_name

_JPEG_BYTES, _WEBP_BYTES, _WEBP_PIXELS = 12, 16, 16_000_000
"""Memory of decoding, per pixel."""
_STRIP_BYTES = 24_000_000


def check_combinations(config: Config) -> None:
    """Reject values that are valid by themselves but not together.

    Raises:
        ConfigError: Each line starts with the path of the key to change.
    """
    _refuse(
        [
            *_sizes(config),
            *_decode_bytes(config.media),
            *_together(config),
            *_cluster(config.cluster, config.together, config.adapters.count_max),
            *_texts(config),
            *_limits(config),
        ]
    )


def check_texts(config: Config) -> None:
    """Reject malformed strings: plug-ins, devices, names, sizes.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    _refuse(_texts(config))


def check_cluster(cluster: ClusterConfig, *, together: bool, adapters: int) -> None:
    """Reject a cluster section on whose hosts no rank can start.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    _refuse(_cluster(cluster, together, adapters))


def check_folders(config: Config) -> None:
    """Reject folders that this host lacks; a record of another host may name them.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    folders = {"media": config.media.directory, "adapters": config.adapters.directory}
    _refuse(
        limit_message(
            f"{section}.directory: not a folder",
            value=repr(folder),
            limit="an existing folder",
            remedy=f"create {os.path.abspath(folder)}, or correct the path",
        )
        for section, folder in folders.items()
        if folder and not os.path.isdir(folder)
    )


def decode_bytes_needed(media: MediaConfig) -> int:
    """Maximum memory for decoding one image within the limits, in any format.

    A test compares it with the estimates in `vsched.media.estimate`. The image processor needs more memory only if it
    enlarges an image, which depends on the checkpoint; such an image is refused when it arrives.
    """
    pixels = max(
        media.image_pixels_max * _JPEG_BYTES,
        min(_WEBP_PIXELS, media.image_pixels_max) * _WEBP_BYTES,
    )
    return pixels + _STRIP_BYTES + 4 * media.image_bytes_max


def _refuse(problems: Iterable[str]) -> None:
    if message := "\n".join(problems):
        raise ConfigError(message)


def _raised(check: Callable[..., object], *values: object, path: str) -> Iterator[str]:
    """Yield the error that a check of one value raises."""
    try:
        check(*values, path=path)
    except ConfigError as error:
        yield str(error)


def _sizes(config: Config) -> Iterator[str]:
    for path, size, least in (
        ("generate.max_batch_tokens", config.generate.max_batch_tokens, 2),
        ("arena.pixel_bytes", config.arena.pixel_bytes, 1024),
        ("arena.embedding_bytes", config.arena.embedding_bytes, 1024),
    ):
        if size < least:
            remedy = "raise it, or set it to 0 for the default"
            yield limit_message(
                f"{path}: too small", value=size, limit=f"at least {least}", remedy=remedy
            )


def _decode_bytes(media: MediaConfig) -> Iterator[str]:
    """A budget that could never admit an image within the other limits."""
    needed = decode_bytes_needed(media)
    if media.decode_bytes < needed:
        yield limit_message(
            "media.decode_bytes: too small to decode the largest image (media.image_pixels_max)",
            value=media.decode_bytes,
            limit=f"at least {needed}",
            remedy="raise media.decode_bytes, or lower media.image_pixels_max and media.image_bytes_max",
        )


def _together(config: Config) -> Iterator[str]:
    if not config.together:
        return
    for key in ("replicas", "tensor_parallel"):
        encode, generate = getattr(config.encode, key), getattr(config.generate, key)
        if encode != generate:
            yield limit_message(
                f"encode.{key}: with placement = together both stages run in the same processes",
                value=encode,
                limit=f"generate.{key}, which is {generate}",
                remedy=f"set encode.{key} and generate.{key} to the same, or placement to separate",
            )
            return
    encode, generate = config.encode, config.generate
    differ = encode.device.removesuffix(":0") != generate.device.removesuffix(":0")
    if encode.on_cuda and generate.on_cuda and differ:
        yield limit_message(
            "encode.device: with placement = together both stages run in the same processes, each with one device",
            value=encode.device,
            limit=f"generate.device, which is {generate.device}",
            remedy="set encode.device and generate.device to the same, or placement to separate",
        )


def _limits(config: Config) -> Iterator[str]:
    """Keys whose upper limit is another key."""
    generate, adapters, deadlines = config.generate, config.adapters, config.deadlines
    loaded = len(adapters.load)
    if loaded > adapters.count_max:
        yield limit_message(
            "adapters.load: more adapters than adapters.count_max allows",
            value=loaded,
            limit=adapters.count_max,
            remedy=f"set adapters.count_max to {loaded}, or name fewer",
        )
    late = deadlines.rank_timeout_s / 2
    chunk = "a chunk cannot be longer than a step (generate.max_batch_tokens)"
    slots = "a step full of decodes must leave room for prefill (generate.max_batch_tokens)"
    beat = "a rank must not time out over one late heartbeat (half of deadlines.rank_timeout_s)"
    for path, value, limit, reason in (
        ("generate.chunk_tokens", generate.chunk_tokens, generate.max_batch_tokens, chunk),
        ("generate.slots", generate.slots, generate.max_batch_tokens - 1, slots),
        ("deadlines.heartbeat_s", deadlines.heartbeat_s, late, beat),
    ):
        if value > limit:
            remedy = f"set {path} to {limit:g} or less"
            yield limit_message(f"{path}: {reason}", value=value, limit=limit, remedy=remedy)


def _texts(config: Config) -> Iterator[str]:
    for name, stage in (("encode", config.encode), ("generate", config.generate)):
        yield from _raised(check_worker_name, stage.plugin, path=f"{name}.plugin")
    for path, wanted in _patterns().items():
        section, _, name = path.partition(".")
        value = getattr(getattr(config, section), name)
        yield from _raised(convert_value, value, wanted, path=path)
    if config.server.tenant_header and config.server.tenant_keys_variable:
        yield (
            "server.tenant_header: keys identify tenants already (server.tenant_keys_variable), and a client could "
            "claim to be another. Remedy: set one of the two"
        )


@cache
def _patterns() -> dict[str, Any]:
    """The types of keys whose texts have a form, by path."""
    types = {path: field.type for path, field in config_keys().items()}
    return {
        path: one for path, one in types.items() if "'pattern'" in str(msgspec.json.schema(one))
    }


def _cluster(cluster: ClusterConfig, together: bool, adapters: int) -> Iterator[str]:
    owners = {OWN_HOST: "this host", RAY_HOST: "Ray's"}
    for name in cluster.hosts:
        if name in owners:
            yield f"cluster.hosts: {name!r} is {owners[name]}. Remedy: choose another name"
    yield from _cluster_stages(cluster)
    if not cluster.elsewhere:
        return
    if not cluster.key_file and not cluster.used <= {OWN_HOST, RAY_HOST}:
        yield (
            "cluster.key_file: not set, and hosts need a key. Remedy: create one with "
            "`vsched host --make-key FILE`, and copy it to every host"
        )
    if together and cluster.encode:
        yield (
            "cluster.encode: with placement = together both stages start where the generate stage does. Remedy: "
            "list the hosts only in cluster.generate"
        )
    if adapters:
        yield limit_message(
            "adapters.count_max: ranks on other hosts do not have the files of adapters",
            value=adapters,
            limit="0 with cluster.encode, cluster.generate or cluster.ray",
            remedy="serve adapters on one host",
        )


def _cluster_stages(cluster: ClusterConfig) -> Iterator[str]:
    """Hosts and Ray resources of each stage."""
    known = [*cluster.hosts, OWN_HOST, *([RAY_HOST] if cluster.ray else [])]
    stages = {"encode": cluster.encode, "generate": cluster.generate}
    for key, names in stages.items():
        for name in names:
            if name not in known:
                yield f"cluster.{key}: there is no host {name!r}. Remedy: name one of {', '.join(known)}"
    for key, names in stages.items():
        if RAY_HOST in names and {*names} != {RAY_HOST}:
            yield (
                f"cluster.{key}: {', '.join(names)}: Ray places all replicas of a stage, or none. "
                f'Remedy: ["{RAY_HOST}"], or hosts alone'
            )
        for name, amount in getattr(cluster, f"{key}_resources").items():
            if not 0 < amount < math.inf:  # NaN, too
                yield limit_message(
                    f"cluster.{key}_resources.{name}: no amount of a resource",
                    value=amount,
                    limit="a number above 0",
                    remedy="leave out resources that replicas do not need",
                )
