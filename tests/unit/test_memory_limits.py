"""Sizes as operators write them, and the limit of a rank."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.rank.fake_plugin import model_info
from vsched import assembly
from vsched.assembly import WorkerGroupPlan, memory_limit, worker_group_plans
from vsched.config import Config, load_config, resolve_policies
from vsched.config.sections import size_bytes
from vsched.errors import ConfigError
from vsched.worker.spec import default_limit, shared_out, threads_of

GIB = 1 << 30
INFO = model_info()


def config_of(*sets: str) -> Config:
    return load_config(None, sets=sets, environ={}).config


def plans(config: Config) -> list[WorkerGroupPlan]:
    return worker_group_plans(config, INFO, resolve_policies(config))


def limits(*sets: str) -> list[int]:
    config = config_of(*sets)
    return [memory_limit(config, plan) for plan in plans(config)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("7MiB", 7 << 20),
    ],
)
def test_size_bytes_reads_numbers_and_units(written: int | str, expected: int) -> None:
    assert size_bytes(written, path="x") == expected


@pytest.mark.parametrize(
    ("key", "written"),
    [
        *(("encode.memory_limit", one) for one in ("4GB", "-1", "", "GiB", "1e3", "4 G iB", "nan")),
        ("generate.memory_limit", "4GB"),
        ("encode.reserved", "auto"),
    ],
)
def test_config_refuses_a_size_that_cannot_be_read(key: str, written: str) -> None:
    """Found at load, with its path, the value and valid values; only the limits may be `auto`."""
    with pytest.raises(ConfigError, match=rf"{key} .*is not valid: value .* limit .* Remedy: "):
        config_of(f'{key}="{written}"')


@pytest.mark.parametrize(
    ("available_gib", "ranks", "expected_gib"),
    [
        (4, 2, 1.0),
        (8, 2, 2.0),
        (12, 2, 2.0),
        (16, 2, 2.0),
        (64, 2, 8.0),
        (64, 7, 8.0),
        (63, 8, 7.0),
        (18, 8, 2.0),
        (9, 8, 1.0),
    ],
)
def test_default_limit_leaves_room(available_gib: int, ranks: int, expected_gib: float) -> None:
    """All ranks together leave the share of one; two of them half of the host."""
    assert default_limit(available_gib * GIB, ranks=ranks) == expected_gib * GIB


def test_memory_limit_is_per_process_and_adds_up_if_one_process_does_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "host_available", lambda: 64 * GIB)
    assert limits() == [8 * GIB, 8 * GIB]
    assert limits("generate.memory_limit=3GiB", "encode.memory_limit=0") == [0, 3 * GIB]
    assert limits("generate.memory_limit=3GiB", "placement=together") == [11 * GIB]
    assert limits("generate.memory_limit=0", "placement=together") == [0]


def test_memory_limit_of_a_gpu_rank_is_none_by_default() -> None:
    """A GPU rank's private memory includes mappings of the driver, of whatever size."""
    config = config_of()
    gpu = msgspec.structs.replace(
        config, generate=msgspec.structs.replace(config.generate, device="cuda:0")
    )
    assert memory_limit(gpu, plans(gpu)[1]) == 0


def test_reserved_size_goes_to_the_encode_rank() -> None:
    """The override arrives in bytes; without one the rank measures."""
    for sets, expected in (
        ((), None),
        (('encode.reserved="2GiB"',), 2 * GIB),
        (("encode.reserved=0",), 0),
    ):
        config = config_of(*sets)
        encode = plans(config)[0].encode
        assert encode is not None
        assert encode.reserved_bytes == expected


def shared(*sets: str, cores: int = 16, available_bytes: int = 32 * GIB) -> list[tuple[int, int]]:
    """Threads and memory of the process of each plan, on a host of this size."""
    config = config_of(*sets)
    layout = assembly.arena_layout(config, INFO)
    specs = [assembly.rank_spec(config, INFO, plan, layout) for plan in plans(config)]
    there = [shared_out(spec, cores=cores, available_bytes=available_bytes) for spec in specs]
    return [(threads_of(spec), spec.memory_limit_bytes) for spec in there]


HOSTS = ('cluster.hosts={a="tcp://h:1", b="tcp://i:1"}', "cluster.key_file=k")
SPREAD = (*HOSTS, "encode.replicas=3", 'cluster.encode=["a", "b"]')


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        # Two encoders on a, one on b, which has the cores of a host for itself.
        (SPREAD, [(8, 4 * GIB), (16, 4 * GIB), (8, 4 * GIB), (16, 4 * GIB)]),
        (
            (*SPREAD, "encode.threads=3", "encode.memory_limit=1GiB"),
            [(3, GIB)] * 3 + [(16, 4 * GIB)],
        ),
        # A bundle on Ray has its CPUs for its own ranks, however many bundles there are.
        (("cluster.ray=auto", "encode.replicas=3"), [(16, 4 * GIB)] * 4),
        ((*SPREAD, "encode.memory_limit=0"), [(8, 0), (16, 0), (8, 0), (16, 4 * GIB)]),
        (
            (*HOSTS, "placement=together", 'cluster.generate=["a"]', "encode.memory_limit=1GiB"),
            [(16, 5 * GIB)],
        ),
    ],
)
def test_what_is_left_open_follows_from_the_host_of_a_rank(
    sets: tuple[str, ...], expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine's own machine has."""
    monkeypatch.setattr(assembly, "host_available", lambda: 5 * GIB)
    assert shared(*sets) == expected
