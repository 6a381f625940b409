"""A real model whose replicas Ray places on three nodes, which are processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.asking import Ask, choices, drawn_image
from tests.e2e.losing import check_stream_outlives_host
from tests.patience import PATIENCE_S
from vsched import Config, Engine

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.slow,
]
ASKS = [
    Ask("What is in the image?", [drawn_image(1)]),
    Ask("What differs?", [drawn_image(2), drawn_image(3, (140, 100))], count=40),
    Ask("0 1 2 3 4 5"),
]
LONG = Ask("Describe the picture.", [drawn_image(4)], count=400)


class Nodes:
    """The nodes of a Ray cluster: the head, one for each stage."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**self._small("head"), "include_dashboard": False},
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
    """The tokens of one host; and the tokens of a stream whose node is killed in the middle of it, and replaced."""
    here = [one.token_ids for one in await choices(engine, [*ASKS, LONG], at_once=4)]
    elsewhere = configure(
        "nano25",
        f"cluster.ray={nodes.address}",
        "cluster.ray_strategy=spread",
        "cluster.encode_resources={CPU=1, encodes=1}",
        "cluster.generate_resources={CPU=1, generates=1}",
    )
    async with Engine(elsewhere) as there:
        found = [one.token_ids for one in await choices(there, ASKS, at_once=3)]
        assert found == here[:-1]
        await check_stream_outlives_host(
            there,
            (LONG, here[-1]),
            list(zip(ASKS, here, strict=False)),
            strike=lambda: nodes.kill("generate"),
            mend=lambda: nodes.add("generate"),
        )
