"""Defaults that depend on the machine: cores within quotas, `placement = "auto"`, and the limit of a rank's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from tests.machines import pretend_cores
from tests.unit.configs import config_of
from tests.unit.rank.fake_plugin import model_info
from vsched import assembly
from vsched.assembly import rank_specs
from vsched.config import Config, resolve_policies
from vsched.config.devices import HEAVY_BYTES, choose_placement, placed, placement_here
from vsched.types import ModelInfo
from vsched.worker import memory
from vsched.worker.spec import (
    RankSpec,
    cores_text,
    default_room,
    shared_out,
    threads_of,
    usable_cores,
)

TINY, MID = 10 << 20, 800 << 20


@pytest.mark.parametrize(
    ("sets", "weights_bytes", "cores", "expected", "why"),
    [
        *(((), MID, cores, "together", f"share of {cores} cores") for cores in (1, 2, 4, 8)),
        ((), MID, 64, "separate", "64 cores are enough"),
        *(((), TINY, cores, "separate", "weights of 10 MiB are light") for cores in (1, 2, 8)),
        ((), HEAVY_BYTES, 2, "together", "weights of 256 MiB"),
        ((), HEAVY_BYTES - 1, 2, "separate", "light"),
        (("placement=separate",), MID, 2, "separate", "configured"),
        (("placement=together",), TINY, 64, "together", "configured"),
        (("generate.threads=1",), MID, 2, "separate", "threads are configured"),
        (("encode.threads=1",), MID, 2, "separate", "threads are configured"),
        (("generate.replicas=2",), MID, 2, "separate", "stages differ"),
        (("generate.tensor_parallel=2",), MID, 2, "separate", "stages differ"),
        (("encode.device=cuda:0",), MID, 2, "separate", "device of its own"),
        (("generate.device=cuda:0",), MID, 2, "separate", "device of its own"),
        (("encode.replicas=0",), MID, 2, "separate", "nothing encodes"),
    ],
)
def test_placement_follows_machine_checkpoint_and_settings(
    sets: tuple[str, ...], weights_bytes: int, cores: int, expected: str, why: str
) -> None:
    found = choose_placement(config_of(*sets), weights_bytes=weights_bytes, cores=cores)
    assert found.placement == expected
    assert why in found.reason
    assert str(found).startswith(f"placement = {expected}, because {found.reason}")


@pytest.mark.parametrize(
    ("sets", "weights_bytes", "cores"),
    [
        ((), MID, 2),
        ((), TINY, 1),
        ((), TINY, 64),
        (("placement=separate",), TINY, 2),
        (("generate.threads=1",), TINY, 2),
        (("encode.replicas=2", "generate.replicas=2"), TINY, 2),
    ],
)
def test_placement_advises_replicas_only_where_they_were_worth_it(
    sets: tuple[str, ...], weights_bytes: int, cores: int
) -> None:
    """The advice names settings; once they are set, there is none."""
    reported = str(choose_placement(config_of(), weights_bytes=TINY, cores=2))
    named = re.findall(r"--set (\S+)", reported)
    assert config_of(*named).generate.replicas == config_of(*named).encode.replicas == 2
    found = choose_placement(config_of(*sets), weights_bytes=weights_bytes, cores=cores)
    assert not found.advice
    assert not choose_placement(config_of(*named), weights_bytes=TINY, cores=2).advice


def test_placement_is_that_of_the_weights_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    config = config_of(f"model.path={tmp_path}")
    assert placed(config).placement == "separate"
    for part in range(2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(HEAVY_BYTES // 2)
    assert placement_here(config).placement == "together"
    assert placed(config).placement == "together"
    assert placed(config_of(f"model.path={tmp_path}", "placement=separate")).placement == "separate"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 64 cores, and an empty folder in place of that of control groups."""
    pretend_cores(monkeypatch, 64)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def share_group(folder: Path, quota: str, period: str = "100000", *, older: bool = False) -> None:
    """Write the processor quota of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    if older:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    else:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [
        ("200000", "none", 2),
        ("none", "200000", 2),
        ("400000", "300000", 3),
        ("250000", "none", 2),
        ("150000", "none", 1),
        ("50000", "none", 1),
        ("9900000", "none", 64),
        ("none", "none", 64),
    ],
)
def test_cores_are_those_of_the_narrowest_control_group(
    groups: Path, own: str, above: str, cores: int, *, older: bool
) -> None:
    """A container of 2 CPUs may run on all 64 cores of its host, but not at once."""
    unlimited = "-1" if older else "max"
    base = groups / "cpu" if older else groups
    line = "3:cpu,cpuacct:/slice/own\n" if older else "0::/slice/own\n"
    (groups.parent / "own").write_text(line)
    share_group(base / "slice" / "own", own.replace("none", unlimited), older=older)
    share_group(base / "slice", above.replace("none", unlimited), older=older)
    assert usable_cores() == cores


def test_cores_are_those_of_the_affinity_if_no_group_can_be_seen(groups: Path) -> None:
    assert not groups.exists()
    assert usable_cores() == 64


def test_cores_text_names_affinity_and_quota(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores_text() == "64 usable: affinity to 64 of 64, no quota"
    (groups.parent / "own").write_text("0::/\n")
    share_group(groups, "150000")
    assert cores_text() == "1 usable: affinity to 64 of 64, a quota of 1.5 CPUs"


def test_cores_of_a_container_set_threads_and_placement(groups: Path, tmp_path: Path) -> None:
    """The path of its group may be that outside of the container, which does not exist inside."""
    (tmp_path / "own").write_text("0::/docker/abc\n")
    share_group(groups, "200000")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    config = config_of(f"model.path={tmp_path}")
    assert (config.threads("encode"), config.threads("generate")) == (1, 1)
    assert placement_here(config).placement == "together"


def test_cores_are_those_of_a_pinned_process() -> None:
    """As by `taskset`, or by the cpuset of a control group."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, own)


# --- memory: sizes as operators write them, and the limit of a rank ---

GIB = 1 << 30
INFO = msgspec.structs.replace(model_info(), kv_bytes_per_token=0)


def specs_of(config: Config, info: ModelInfo = INFO) -> list[RankSpec]:
    return rank_specs(config, info, resolve_policies(config))


def limits(*sets: str, info: ModelInfo = INFO) -> list[int]:
    return [spec.memory_limit_bytes for spec in specs_of(config_of(*sets), info)]


@pytest.mark.parametrize(
    ("available_gib", "ranks", "expected_gib"),
    [(4, 2, 1.0), (24, 2, 4.0), (64, 2, 8.0), (64, 7, 8.0), (18, 8, 2.0), (9, 8, 1.0), (-1, 1, 0)],
)
def test_default_room_is_a_part_of_the_host(
    available_gib: int, ranks: int, expected_gib: float
) -> None:
    """All ranks together leave the share of one; two of them half of the host."""
    assert default_room(available_gib * GIB, ranks=ranks) == expected_gib * GIB


def test_memory_limit_is_per_process_and_adds_up_if_one_process_does_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "host_available", lambda: 64 * GIB)
    assert limits() == [8 * GIB, 8 * GIB]
    assert limits("generate.memory_limit=3GiB", "encode.memory_limit=0") == [0, 3 * GIB]
    assert limits("generate.memory_limit=1.5 GiB", "encode.memory_limit=7MiB") == [7 << 20, 3 << 29]
    assert limits("generate.memory_limit=4096", 'encode.memory_limit="4096"') == [4096, 4096]
    assert limits("generate.memory_limit=3GiB", "placement=together") == [11 * GIB]
    assert limits("generate.memory_limit=0", "placement=together") == [0]


@pytest.mark.parametrize(
    ("sets", "expected_gib"),
    [
        ((), [1 + 5, 16 + 5]),
        (("placement=together",), [17 + 2 * 5]),
        (("generate.tensor_parallel=2", "generate.memory_limit=30GiB"), [1 + 5, 30]),
        (("generate.tensor_parallel=2",), [1 + 5, 8 + 5]),
        (("generate.weights=int4", "encode.memory_limit=2GiB"), [2, 5.12 + (57 - 1 - 5.12) / 8]),
    ],
)
def test_default_memory_limit_holds_the_weights(
    monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], expected_gib: list[float]
) -> None:
    """Of one rank as served, and a part of the memory that the weights of all ranks leave."""
    monkeypatch.setattr(assembly, "host_available", lambda: 57 * GIB)
    info = msgspec.structs.replace(INFO, vision_bytes=GIB, language_bytes=16 * GIB)
    expected = [each * GIB for each in expected_gib]
    assert limits(*sets, info=info) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kv_gib", "expected_gib"), [(8, [8, 16]), (40, [8, 64 / 3])])
def test_default_memory_limit_holds_the_longest_context(
    monkeypatch: pytest.MonkeyPatch, kv_gib: int, expected_gib: list[float]
) -> None:
    """Unless all ranks would leave less than the share of one."""
    monkeypatch.setattr(assembly, "host_available", lambda: 64 * GIB)
    info = msgspec.structs.replace(INFO, context_tokens=GIB, kv_bytes_per_token=kv_gib)
    assert limits(info=info) == [int(each * GIB) for each in expected_gib]


def test_memory_limit_of_a_gpu_rank_is_none_by_default() -> None:
    """A GPU rank's private memory includes mappings of the driver, of whatever size."""
    assert limits("generate.device=cuda:0", "placement=separate")[1] == 0


def test_reserved_size_goes_to_the_encode_rank() -> None:
    """The override arrives in bytes; without one the rank measures."""
    for expected, *sets in ((None,), (2 * GIB, 'encode.reserved="2GiB"'), (0, "encode.reserved=0")):
        config = config_of(*sets)
        encode = specs_of(config)[0].encode
        assert encode is not None
        assert encode.reserved_bytes == expected


def shared(*sets: str, cores: int = 16, available_bytes: int = 32 * GIB) -> list[tuple[int, int]]:
    """Threads and memory of the process of each worker group, on a host of this size."""
    specs = specs_of(config_of(*sets))
    there = [shared_out(spec, cores=cores, available_bytes=available_bytes) for spec in specs]
    return [(threads_of(spec), spec.memory_limit_bytes) for spec in there]


HOSTS = ('cluster.hosts={a="tcp://h:1", b="tcp://i:1"}', "cluster.key_file=k")
LIMITED = "encode.memory_limit=1GiB"
SPREAD = (*HOSTS, "encode.replicas=3", 'cluster.encode=["a", "b"]')


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        # Two encoders on a, one on b, which has the cores of a host for itself.
        (SPREAD, [(8, 4 * GIB), (16, 4 * GIB), (8, 4 * GIB), (16, 4 * GIB)]),
        ((*SPREAD, "encode.threads=3", LIMITED), [(3, GIB)] * 3 + [(16, 4 * GIB)]),
        # A bundle on Ray has its CPUs for its own ranks, however many bundles there are.
        (("cluster.ray=auto", "encode.replicas=3"), [(16, 4 * GIB)] * 4),
        ((*SPREAD, "encode.memory_limit=0"), [(8, 0), (16, 0), (8, 0), (16, 4 * GIB)]),
        ((*HOSTS, "placement=together", 'cluster.generate=["a"]', LIMITED), [(16, 5 * GIB)]),
    ],
)
def test_what_is_left_open_follows_from_the_host_of_a_rank(
    sets: tuple[str, ...], expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine's own machine has."""
    monkeypatch.setattr(assembly, "host_available", lambda: 5 * GIB)
    assert shared(*sets) == expected
