"""Adapters by request with real ranks: the tokens of PEFT's own `generate`, whatever happens to ranks meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, held, read
from tests.e2e.losing import answers_over_a_kill
from tests.patience import PATIENCE_S, until
from tests.workers.adapters.peft_adapters import AdaptedReference
from vsched import Config, Engine
from vsched.api.server import RunningServer, running_server
from vsched.record import replay

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.slow,
]

ADAPTERS = ("one", "two")


class Adapted(NamedTuple):
    """A folder of adapters, and PEFT's output with each."""

    folder: Path
    references: dict[str, AdaptedReference]

    def tokens(self, engine: Engine, ask: Ask, name: str) -> list[int]:
        prompt = ask.prompt(engine.preprocessor)
        return self.references[name].generate(prompt, ask.images, ask.count)


@pytest.fixture(scope="module")
def adapted(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    """Adapters of tower and language model."""
    folder = tmp_path_factory.mktemp("adapters")
    references = {
        name: AdaptedReference(checkpoints("nano25"), folder / name, seed=seed, layers="all-linear")
        for seed, name in enumerate(ADAPTERS)
    }
    return Adapted(folder, references)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapting(
    configure: Callable[..., Config], adapted: Adapted, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    """A server with two replicas, one adapter at start, and space for another; all its decisions are recorded."""
    record = tmp_path_factory.mktemp("record") / "run.vlog"
    settings = (
        f"record.path={record}",
        "record.segment_bytes=16384",
        "record.segments=1000",
        "adapters.count_max=2",
        "adapters.rank_max=4",
        "adapters.encoder=true",
        f"adapters.directory={adapted.folder}",
        f'adapters.load={{one = "{adapted.folder / "one"}"}}',
        "generate.replicas=2",
    )
    async with running_server(configure("nano25", *settings)) as server:
        yield server
    # With its losses, and adapters that came and went; each segment begins with the scheduler's state at that point.
    # Tests of this module may be shared out among processes, so there may be few requests.
    report = replay(record)
    assert report.difference is None
    assert report.requests > 1


@pytest_asyncio.fixture(loop_scope="module")
async def client(adapting: RunningServer) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(base_url=adapting.url, timeout=PATIENCE_S) as client:
        yield client
    engine = adapting.engine
    assert not any(held(engine).values()), held(engine)
    assert all(not row["running"] for row in engine.adapters())


async def loaded(client: Any, name: str = "two", path: str = "two") -> None:
    known = (await client.get("/admin/adapters")).json()["adapters"]
    if name not in [row["name"] for row in known]:
        reply = await client.post("/admin/adapters", json={"name": name, "path": path})
        assert reply.status_code == 200, reply.text


def asks(seed: int) -> list[Ask]:
    return [
        Ask(TEXTS[n % 5], [drawn_image(seed + 10 * n + k) for k in range(n % 2)], count=24)
        for n in range(4)
    ]


async def answered(engine: Engine, ask: Ask, name: str) -> list[int]:
    return (await read(await begin(engine, ask, adapter=name))).token_ids


async def test_requests_with_and_without_adapters_answer_as_peft_does(
    client: Any, adapting: RunningServer, adapted: Adapted, generated: Any
) -> None:
    """Concurrently in two replicas, the same prompts with each: neither blocks nor embeddings are shared."""
    await loaded(client)
    engine, asked = adapting.engine, asks(100)
    encoded = engine.statistics()["encode"]["items_encoded"]
    wanted = {name: [adapted.tokens(engine, ask, name) for ask in asked] for name in ADAPTERS}
    wanted[""] = generated("nano25", asked)
    assert len({tuple(tokens[0]) for tokens in wanted.values()}) == 3, "each changes the answer"
    for _ in range(2):  # the second time from the prefix cache
        begun = {name: [await begin(engine, ask, adapter=name) for ask in asked] for name in wanted}
        for name, streams in begun.items():
            found = await asyncio.gather(*map(read, streams))
            assert [one.token_ids for one in found] == wanted[name], name
    counts = engine.statistics()
    assert counts["generate"]["tokens_cached"] > 0
    images = sum(len(ask.images) for ask in asked)
    assert counts["encode"]["items_encoded"] - encoded == images * len(wanted)


async def test_a_killed_rank_comes_back_with_its_adapters(
    client: Any, adapting: RunningServer, adapted: Adapted
) -> None:
    """Streams resume with the same tokens, although the files of the adapters are gone by then."""
    shutil.copytree(adapted.folder / "two", adapted.folder / "passing")
    await loaded(client)
    await client.delete("/admin/adapters/two")
    await loaded(client, "passing", "passing")
    shutil.rmtree(adapted.folder / "passing")
    engine = adapting.engine
    asked = [Ask(ask.text, ask.images, count=60) for ask in asks(300)]
    wanted = [adapted.tokens(engine, ask, ADAPTERS[n % 2]) for n, ask in enumerate(asked)]
    names = ["one", "passing"]
    begun = [await begin(engine, ask, adapter=names[n % 2]) for n, ask in enumerate(asked)]
    found = await answers_over_a_kill(engine, begun, *engine.rank_pids[1:], tokens=30)
    assert [one.token_ids for one in found] == wanted
    assert (await client.delete("/admin/adapters/passing")).json()["state"] == "unloaded"


async def test_an_adapter_is_unloaded_once_its_requests_have_ended(
    client: Any, adapting: RunningServer, adapted: Adapted
) -> None:
    await loaded(client)
    engine, ask = adapting.engine, Ask(TEXTS[2], [], count=60)
    stream = await begin(engine, ask, adapter="two")
    gone = asyncio.ensure_future(client.delete("/admin/adapters/two"))

    def state() -> dict[str, str]:
        return {row["name"]: row["state"] for row in engine.adapters()}

    await until(lambda: state()["two"] == "unloading", "it is being unloaded")
    body = {"model": "two", "messages": ask.messages}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 404
    assert (await read(stream)).token_ids == adapted.tokens(engine, ask, "two")
    assert (await gone).status_code == 200
    assert "two" not in state()
    # Another adapter has its name now, and cached blocks of the first are not used for it.
    await loaded(client, "two", "one")
    assert await answered(engine, ask, "two") == adapted.tokens(engine, ask, "one")
    await client.delete("/admin/adapters/two")


async def test_adapters_that_cannot_be_loaded_are_refused_and_nothing_is_lost(
    client: Any, adapting: RunningServer, adapted: Adapted, generated: Any
) -> None:
    """While requests run, which are not affected; further refusals are in `tests/workers/adapters` and `tests/unit`."""
    await client.delete("/admin/adapters/two")  # there is space for another
    engine, ask = adapting.engine, Ask(TEXTS[4], [drawn_image(900)], count=200)
    weights = "adapter_model.safetensors"
    for name in ("damaged", "pickled"):
        shutil.copytree(adapted.folder / "one", adapted.folder / name)
    (adapted.folder / "damaged" / weights).write_bytes(b"no tensors")
    (adapted.folder / "pickled" / weights).rename(adapted.folder / "pickled/adapter_model.bin")
    wanted = [adapted.tokens(engine, ask, "one"), generated("nano25", [ask])[0]]
    restarts = [group["restarts"] for group in engine.groups()]
    running = [await begin(engine, ask, adapter=name) for name in ("one", "")]
    for name, path, status, words in (
        ("x", "damaged", 400, "corrupt"),
        ("x", "pickled", 400, "adapter_model.bin) are never loaded"),
        ("x", "../outside", 403, "below adapters.directory"),
        ("one", "two", 409, "is the name of an adapter"),
    ):
        reply = await client.post("/admin/adapters", json={"name": name, "path": path})
        assert reply.status_code == status, reply.text
        message = reply.json()["error"]["message"]
        assert words in message, message
        assert "Remedy" in message
        assert str(adapted.folder) not in message
    short = Ask(TEXTS[3], [], count=12)
    for path in ADAPTERS:  # others that come and go
        await client.delete("/admin/adapters/two")
        await loaded(client, "two", path)
        assert await answered(engine, short, "two") == adapted.tokens(engine, short, path)
    assert [(await read(one)).token_ids for one in running] == wanted
    assert [group["restarts"] for group in engine.groups()] == restarts
    full = await client.post("/admin/adapters", json={"name": "x", "path": "one"})
    assert (full.status_code, full.json()["error"]["code"]) == (409, "too_many_adapters")
    assert (await client.delete("/admin/adapters/x")).status_code == 404
