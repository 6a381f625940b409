"""A real model whose replicas Ray places on three nodes, which are processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.losing import check_host_loss
from tests.patience import PATIENCE_S
from vsched import Config, Engine

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # else other programs cost an actor
pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.slow,
]


class Nodes:
    """The nodes of a Ray cluster: the head, one for each stage."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={**self._small("head"), "include_dashboard": False}
        )
        self.address = str(self._cluster.address)
        self._nodes: dict[str, Any] = {}
        for stage in ("encode", "generate"):
            self.add(stage)

    def _small(self, stage: str) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": 80 << 20, "resources": {f"{stage}s": 1}}

    def add(self, stage: str) -> None:
        """Add a node for a stage."""
        self._nodes[stage] = self._cluster.add_node(**self._small(stage))

    def kill(self, stage: str) -> None:
        """Kill a node with SIGKILL."""
        self._cluster.remove_node(self._nodes.pop(stage), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


async def test_ray_replicas_answer_as_one_host_and_streams_outlive_a_node(
    configure: Callable[..., Config], engine: Engine, nodes: Nodes
) -> None:
    """The node of the generate stage is killed, and replaced."""
    config = configure(
        "nano25",
        f"cluster.ray={nodes.address}",
        "cluster.ray_strategy=spread",
        "cluster.encode_resources={CPU=1, encodes=1}",
        "cluster.generate_resources={CPU=1, generates=1}",
    )
    await check_host_loss(
        engine, config, strike=lambda: nodes.kill("generate"), mend=lambda: nodes.add("generate")
    )
