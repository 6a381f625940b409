"""Hosts in a configuration: what nothing can be started on is refused, with what to do."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (['cluster.hosts={far = "10.0.0.2"}'], "cluster.hosts.far: no address: value '10.0.0.2'"),
        (['cluster.hosts={local = "tcp://h:1"}'], "cluster.hosts: 'local' is this host"),
        ([KEY, THERE], "cluster.generate: there is no host 'far'. Remedy: name one of local"),
        ([HOSTS, THERE], "cluster.key_file: not set"),
        (
            [HOSTS, KEY, 'cluster.encode=["far"]', "placement=together"],
            "cluster.encode: with placement = together",
        ),
        ([HOSTS, KEY, THERE, "adapters.count_max=2"], "adapters.count_max: ranks on other hosts"),
    ],
)
def test_cluster_of_no_use_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, sets=sets, environ={})
    assert str(refusal.value).startswith(said)
