"""Hosts in a configuration: impossible ones are refused, with a remedy."""

from __future__ import annotations

import pytest

from tests.machines import pretend_cores
from vsched.config import load_config
from vsched.errors import ConfigError

HOSTS = 'cluster.hosts={far = "tcp://10.0.0.2:7700"}'
KEY = "cluster.key_file=hosts.key"
THERE = 'cluster.generate=["far", "local"]'


def test_cluster_of_hosts_is_read() -> None:
    cluster = load_config(None, sets=[HOSTS, KEY, THERE], environ={}).config.cluster
    assert cluster.hosts == {"far": "tcp://10.0.0.2:7700"}
    assert cluster.generate == ["far", "local"]
    assert cluster.elsewhere


@pytest.mark.parametrize("sets", [[], [HOSTS], [HOSTS, 'cluster.encode=["local"]']])
def test_cluster_that_nothing_starts_on_needs_no_key(sets: list[str]) -> None:
    assert not load_config(None, sets=sets, environ={}).config.cluster.elsewhere


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[fd00::1]:6379"])
def test_cluster_on_ray_needs_no_key(address: str) -> None:
    """A stage whose list is empty starts there."""
    sets = [f'cluster.ray="{address}"', 'cluster.encode=["local"]']
    cluster = load_config(None, sets=sets, environ={}).config.cluster
    assert cluster.elsewhere
    assert (cluster.hosts_of("encode"), cluster.hosts_of("generate")) == (["local"], ["ray"])


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ['cluster.hosts={far = "10.0.0.2"}'],
            "cluster.hosts (from command line) is not valid: value {'far",
        ),
        (['cluster.hosts={local = "tcp://h:1"}'], "cluster.hosts: 'local' is this host"),
        ([KEY, THERE], "cluster.generate: there is no host 'far'. Remedy: name one of local"),
        ([HOSTS, THERE], "cluster.key_file: not set"),
        (
            [HOSTS, KEY, 'cluster.encode=["far"]', "placement=together"],
            "cluster.encode: with placement = together",
        ),
        ([HOSTS, KEY, THERE, "adapters.count_max=2"], "adapters.count_max: ranks on other hosts"),
        (["cluster.ray=auto", "adapters.count_max=2"], "adapters.count_max: ranks on other hosts"),
        (['cluster.hosts={ray = "tcp://h:1"}'], "cluster.hosts: 'ray' is Ray's"),
        (['cluster.encode=["ray"]'], "cluster.encode: there is no host 'ray'"),
        (
            ["cluster.ray=ray://head:10001"],
            "cluster.ray (from command line) is not valid: value 'ray:",
        ),
        (
            ["cluster.ray=auto", 'cluster.encode=["ray", "local"]'],
            "cluster.encode: ray, local: Ray",
        ),
        (
            ["cluster.ray=auto", "cluster.encode_resources={CPU=0}"],
            "cluster.encode_resources.CPU: no amount of a resource: value 0",
        ),
        (["cluster.ray=auto", HOSTS, 'cluster.encode=["far"]'], "cluster.key_file: not set"),
    ],
)
def test_cluster_of_no_use_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, sets=sets, environ={})
    assert str(refusal.value).startswith(said)


@pytest.mark.parametrize(
    ("sets", "here", "there"),
    [
        ([], 2, 0),
        ([HOSTS, KEY, 'cluster.encode=["far"]'], 1, 1),
        ([HOSTS, KEY, THERE, "generate.replicas=3", "generate.tensor_parallel=2"], 3, 4),
        ([HOSTS, KEY, THERE, "placement=together"], 0, 1),
    ],
)
def test_cluster_shares_cores_out_among_those_that_start_there(
    sets: list[str], here: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another host takes none of the cores of this one."""
    pretend_cores(monkeypatch, 12)
    config = load_config(None, sets=sets, environ={}).config
    assert (config.processes_on("local"), config.processes_on("far")) == (here, there)
    assert config.threads("generate") == 12 // max(here, 1)
