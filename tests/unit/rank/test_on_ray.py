"""Bundles and actors are requested from Ray, and replicas run on them."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.patience import NEVER_S, until
from tests.unit.rank.fake_plugin import Behaviour, expected_tokens
from tests.unit.rank.hosts import RunningHost
from tests.unit.rank.worker_groups import Place, generate, read, shell_of
from vsched.aio.hosts.ray_hosts import InstalledRay, RayHosts, Resources
from vsched.aio.hosts.remote import placed
from vsched.config import Config, load_config
from vsched.config.sections import ClusterConfig
from vsched.errors import ConfigError
from vsched.testing import make_request

pytestmark = pytest.mark.slow
ON_RAY = ("cluster.ray=auto", f"deadlines.rank_timeout_s={NEVER_S}")


class FakeActor:
    """An actor that may run or be restarted."""

    def __init__(self, bundle: int, secret: bytes, cores: int) -> None:
        self.bundle, self.secret, self.cores = bundle, secret, cores
        self.host: RunningHost | None = None


class FakeRay(InstalledRay):
    """The few calls of Ray, with hosts on this event loop for actors."""

    def __init__(self, bundles: Sequence[Resources] = ()) -> None:
        super().__init__()
        self.address = ""
        self.bundles = [*bundles]
        self.strategy = ""
        self.actors: list[FakeActor] = []
        self.closed: list[tuple[int, Any]] = []

    def connect(self, address: str, within_s: float) -> None:
        self.address = address

    def make_group(self, bundles: Sequence[Resources], strategy: str) -> str:
        self.bundles, self.strategy = [*bundles], strategy
        return "made"

    def find_group(self, name: str) -> tuple[str, Sequence[Resources]]:
        return name, self.bundles

    def start_host(
        self, group: Any, bundle: int, resources: Resources, secret: bytes, cores: int
    ) -> FakeActor:
        assert resources == self.bundles[bundle]
        self.actors.append(FakeActor(bundle, secret, cores))
        return self.actors[-1]

    async def address_of(self, actor: FakeActor) -> str:
        while actor.host is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return actor.host.link.address

    def close(self, actors: Sequence[FakeActor], group: Any) -> None:
        self.closed.append((len(actors), group))

    def run(self, actor: FakeActor, ip: str) -> None:
        """Have an actor run, somewhere."""
        actor.host = RunningHost(f"tcp://{ip}:*", actor.secret, f"node at {ip}", cores=actor.cores)

    async def lose(self, actor: FakeActor) -> None:
        """Have an actor be nowhere."""
        assert actor.host is not None
        host, actor.host = actor.host, None
        await host.close()

    async def stop(self) -> None:
        for actor in self.actors:
            if actor.host is not None:
                await self.lose(actor)


def config_of(*sets: str) -> Config:
    return load_config(None, sets=[*ON_RAY, *sets], environ={}).config


async def test_ray_hosts_run_replicas_and_are_found_where_they_went(place: Place) -> None:
    """A replica whose host is lost is found at its new address, with the same tokens."""
    ray = FakeRay()
    place.launcher = placed(config_of("placement=together"), place.launcher, ray=ray)
    try:
        (actor,) = ray.actors
        assert (ray.address, ray.strategy) == ("auto", "pack")
        ray.run(actor, "127.0.0.2")
        groups = (("encode", "generate"),)
        async with shell_of(place, groups=groups, behaviour=Behaviour(step_s=0.004)) as shell:
            request = make_request("image", [14, 15], [(1, 6, b"image1")])
            stream = generate(shell, request, max_tokens=100)
            before = await read(stream, at_least=20)
            await ray.lose(actor)
            await until(lambda: not shell.healthy, "the loss is detected")
            ray.run(actor, "127.0.0.3")
            assert before + await read(stream) == expected_tokens(request.prompt_token_ids, 100)
            assert actor.host is not None
            assert actor.host.server.pids
            assert len(ray.actors) == 1, "Ray restarts it, and only Ray"
        assert ray.closed == []
    finally:
        await ray.stop()
    place.launcher.close()
    assert ray.closed == [(1, "made")]


@pytest.mark.parametrize(
    ("sets", "bundles"),
    [
        (["encode.replicas=2"], [{"CPU": 1}] * 3),
        (['cluster.encode=["local"]', "generate.replicas=2"], [{"CPU": 1}] * 2),
        (['cluster.generate=["local"]', "encode.threads=3"], [{"CPU": 3}]),
        (["placement=together", "generate.threads=2", "encode.threads=4"], [{"CPU": 4}]),
        (["generate.device=cuda:0", "encode.replicas=0"], [{"CPU": 1, "GPU": 1}]),
        (
            ["cluster.encode_resources={CPU=2, cheap=1}", "cluster.generate_resources={GPU=1}"],
            [{"CPU": 2, "cheap": 1}, {"GPU": 1}],
        ),
        (["generate.tensor_parallel=2", "generate.threads=2"], [{"CPU": 1}, {"CPU": 4}]),
    ],
)
def test_ray_has_a_bundle_for_each_replica(sets: list[str], bundles: list[Any]) -> None:
    """With the resources its ranks compute on, or those of the configuration."""
    assert [*config_of(*sets).on_ray.values()] == bundles


def hosts(ray: FakeRay, **settings: Any) -> RayHosts:
    cluster = ClusterConfig(ray="head:6379", **settings)
    replicas = {"ray encode-0": {"CPU": 1.0}, "ray generate-0": {"CPU": 2.0, "GPU": 1.0}}
    return RayHosts(ray, cluster, replicas, b"s" * 32)


@pytest.mark.parametrize(
    ("bundles", "settings", "cores", "group"),
    [
        ([], {"ray_strategy": "strict-spread"}, [1, 2], "made"),
        ([{"CPU": 3.0}, {"GPU": 1.0}, {"CPU": 1.0}], {"ray_group": "mine"}, [3, 1], None),
    ],
    ids=["a group of its own", "a group that is there is left"],
)
def test_ray_hosts_know_the_secret_and_the_cores_of_their_bundle(
    bundles: list[Resources], settings: dict[str, Any], cores: list[int], group: str | None
) -> None:
    ray = FakeRay(bundles)
    made = hosts(ray, **settings)
    assert (ray.address, ray.strategy) == ("head:6379", settings.get("ray_strategy", ""))
    assert [(actor.bundle, actor.cores) for actor in ray.actors] == [*enumerate(cores)]
    assert {actor.secret for actor in ray.actors} == {b"s" * 32}
    made.close()
    assert ray.closed == [(2, group)]


def test_ray_group_with_too_few_bundles_is_refused() -> None:
    """And the connection to the cluster is closed."""
    ray = FakeRay([{"CPU": 3.0}])
    with pytest.raises(ConfigError, match=r"cluster.ray_group: too few bundles.*value 1.*2"):
        hosts(ray, ray_group="mine")
    assert ray.closed == [(0, None)]


def test_ray_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'vsched\[ray\]'"):
        InstalledRay().connect("auto", NEVER_S)


class InstalledStandIn(ModuleType):
    """The side effects of `ray.init` on a process."""

    def __init__(self, failure: Exception | None = None, *, initialized: bool = False) -> None:
        super().__init__("ray")
        self.inits: list[dict[str, Any]] = []
        self.failure = failure
        self.initialized = initialized
        self.shut_down = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.failure is not None:
            raise self.failure

    def shutdown(self) -> None:
        self.shut_down += 1


@pytest.mark.parametrize("initialized", [False, True])
def test_ray_leaves_signals_to_the_server_and_other_connections_open(
    monkeypatch: pytest.MonkeyPatch, *, initialized: bool
) -> None:
    """Ray installs its own handlers when it connects; SIGTERM must drain."""
    module = InstalledStandIn(initialized=initialized)
    monkeypatch.setitem(sys.modules, "ray", module)
    before = signal.getsignal(signal.SIGTERM)
    ray = InstalledRay()
    try:
        ray.connect("auto", NEVER_S)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
    connected = [] if initialized else [("auto", "vsched")]
    assert [(one["address"], one["namespace"]) for one in module.inits] == connected
    ray.close([], None)
    assert module.shut_down == len(connected)


def test_ray_cluster_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nothing listens is not given to Ray, which would try for minutes."""
    module = InstalledStandIn(ConnectionError("nobody."))
    monkeypatch.setitem(sys.modules, "ray", module)
    with pytest.raises(ConfigError, match="no Ray cluster at 'auto': nobody. Remedy"):
        InstalledRay().connect("auto", NEVER_S)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="no Ray cluster at '127.*refused. Remedy"):
            InstalledRay().connect(f"127.0.0.1:{silent.getsockname()[1]}", NEVER_S)
    assert len(module.inits) == 1
