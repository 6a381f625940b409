"""Adapters by request with real ranks: the tokens of PEFT's own `generate`, whatever happens to ranks meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

httpx = pytest.importorskip("httpx")
pytest.importorskip("peft")

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, held, read  # noqa: E402
from tests.patience import PATIENCE_S, until  # noqa: E402
from tests.workers.adapters.peft_adapters import AdaptedReference  # noqa: E402
from vsched import Config, Engine  # noqa: E402
from vsched.api.server import RunningServer, running_server  # noqa: E402

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.slow,
]

ADAPTERS = ("one", "two")


class Adapted(NamedTuple):
    """A folder of adapters, and what PEFT answers with each."""

    folder: Path
    references: dict[str, AdaptedReference]

    def tokens(self, engine: Engine, ask: Ask, name: str) -> list[int]:
        prompt = ask.prompt(engine.preprocessor)
        return self.references[name].generate(prompt, ask.images, ask.count)


@pytest.fixture(scope="module")
def adapted(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    base = checkpoints("nano25")
    references = {
        name: AdaptedReference(base, folder / name, seed=seed) for seed, name in enumerate(ADAPTERS)
    }
    return Adapted(folder, references)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapting(
    configure: Callable[..., Config], adapted: Adapted
) -> AsyncIterator[RunningServer]:
    """A server with two replicas, one adapter at start, and room for another."""
    settings = (
        "adapters.count_max=2",
        "adapters.rank_max=4",
        f"adapters.directory={adapted.folder}",
        f'adapters.load={{one = "{adapted.folder / "one"}"}}',
        "generate.replicas=2",
    )
    async with running_server(configure("nano25", *settings)) as server:
        yield server


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
        for n in range(6)
    ]


async def test_requests_with_and_without_adapters_answer_as_peft_does(
    client: Any, adapting: RunningServer, adapted: Adapted, generated: Any
) -> None:
    """Side by side in two replicas, the same prompts with each: cached blocks of one are not another's."""
    await loaded(client)
    engine, questions = adapting.engine, asks(100)
    wanted = {name: [adapted.tokens(engine, ask, name) for ask in questions] for name in ADAPTERS}
    wanted[""] = generated("nano25", questions)
    assert len({tuple(tokens[0]) for tokens in wanted.values()}) == 3, "each changes the answer"
    for _ in range(2):  # the second time from the prefix cache
        begun = {
            name: [await begin(engine, ask, adapter=name) for ask in questions] for name in wanted
        }
        for name, streams in begun.items():
            found = await asyncio.gather(*map(read, streams))
            assert [one.token_ids for one in found] == wanted[name], name
    assert engine.statistics()["generate"]["tokens_cached"] > 0


async def test_every_dialect_takes_an_adapter_as_its_model_and_says_so(
    client: Any, adapting: RunningServer, adapted: Adapted
) -> None:
    await loaded(client)
    engine, ask = adapting.engine, Ask(TEXTS[1], [], count=12)
    text = engine.preprocessor.detokenize(adapted.tokens(engine, ask, "two"))
    options = {"model": "two", "temperature": 0, "ignore_eos": True, "max_tokens": ask.count}
    chat = {"messages": ask.messages, **options}
    reply = (await client.post("/v1/chat/completions", json=chat)).json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("two", text)
    prompt = engine.preprocessor.render(ask.messages)
    reply = (await client.post("/v1/completions", json={"prompt": prompt, **options})).json()
    assert (reply["model"], reply["choices"][0]["text"]) == ("two", text)
    reply = (await client.post("/v1/messages", json=chat)).json()
    assert (reply["model"], reply["content"][0]["text"]) == ("two", text)
    asked = {"model": "two", "input": ask.messages[0]["content"][-1]["text"], "temperature": 0}
    reply = (await client.post("/v1/responses", json=asked | {"max_output_tokens": 12})).json()
    assert reply["model"] == "two"
    reply = await client.post("/tokenize", json={"model": "two", "messages": ask.messages})
    assert reply.status_code == 200
    seen = ""
    async with client.stream(
        "POST", "/v1/chat/completions", json=chat | {"stream": True}
    ) as stream:
        async for line in stream.aiter_lines():
            seen += line
    assert '"model":"two"' in seen
    listed = {one["id"]: one["parent"] for one in (await client.get("/v1/models")).json()["data"]}
    assert listed == {"nano25": None, "one": "nano25", "two": "nano25"}
    assert (await client.get("/v1/models/two")).json()["parent"] == "nano25"
    refused = await client.post("/v1/chat/completions", json=chat | {"model": "three"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert 'vsched_adapter_requests_total{adapter="two"}' in (await client.get("/metrics")).text


async def test_a_killed_rank_comes_back_with_its_adapters(
    client: Any, adapting: RunningServer, adapted: Adapted
) -> None:
    """Streams go on with the same tokens, though the files that the adapters came from are gone by then."""
    shutil.copytree(adapted.folder / "two", adapted.folder / "passing")
    await loaded(client)
    await client.delete("/admin/adapters/two")
    await loaded(client, "passing", "passing")
    shutil.rmtree(adapted.folder / "passing")
    engine = adapting.engine
    questions = [Ask(ask.text, ask.images, count=60) for ask in asks(300)]
    wanted = [adapted.tokens(engine, ask, ADAPTERS[n % 2]) for n, ask in enumerate(questions)]
    names = ["one", "passing"]
    begun = [await begin(engine, ask, adapter=names[n % 2]) for n, ask in enumerate(questions)]
    await until(lambda: sum(one.output_tokens for one in begun) > 30, "streams are under way")
    for pid in engine.rank_pids[1:]:
        os.kill(pid, signal.SIGKILL)
    found = await asyncio.gather(*map(read, begun))
    assert [one.token_ids for one in found] == wanted
    await until(lambda: engine.state == "ready", "the lost groups are back")
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

    await until(lambda: state()["two"] == "unloading", "it is on its way")
    body = {"model": "two", "messages": ask.messages}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 404
    assert (await client.delete("/admin/adapters/two")).status_code == 409
    assert (await read(stream)).token_ids == adapted.tokens(engine, ask, "two")
    assert (await gone).status_code == 200
    assert "two" not in state()
    # Under its name another adapter answers, and nothing that was cached of the first is its.
    await loaded(client, "two", "one")
    again = await read(await begin(engine, ask, adapter="two"))
    assert again.token_ids == adapted.tokens(engine, ask, "one")
    await client.delete("/admin/adapters/two")


async def test_what_cannot_be_loaded_is_refused_and_nothing_is_lost(
    client: Any, adapting: RunningServer, adapted: Adapted, tmp_path: Path
) -> None:
    from safetensors import torch as files

    save: Any = files.save_file
    folder, weights = adapted.folder, "adapter_model.safetensors"
    for name in ("damaged", "shapes", "rank"):
        shutil.copytree(folder / "one", folder / name, dirs_exist_ok=True)
    (folder / "damaged" / weights).write_bytes(b"no tensors")
    tensors = files.load_file(folder / "one" / weights)
    first = min(name for name in tensors if "lora_A" in name)
    save({**tensors, first: tensors[first][:, 1:].contiguous()}, folder / "shapes" / weights)
    save(
        {
            name: tensor.repeat(2, 1) if "lora_A" in name else tensor.repeat(1, 2)
            for name, tensor in tensors.items()
        },
        folder / "rank" / weights,
    )
    shutil.copytree(folder / "one", tmp_path / "outside")
    for name, path, status, words in (
        ("x", "damaged", 400, "corrupt"),
        ("x", "shapes", 400, "inputs and outputs"),
        ("x", "rank", 400, "value 8, limit 4"),
        ("x", "nowhere", 404, "no folder"),
        ("x", str(tmp_path / "outside"), 403, "below adapters.directory"),
        ("x", "../outside", 403, "below adapters.directory"),
        ("one", "two", 409, "is the name of an adapter"),
        ("nano25", "two", 409, "is the name of the model itself"),
        ("", "two", 400, "name"),
    ):
        reply = await client.post("/admin/adapters", json={"name": name, "path": path})
        assert reply.status_code == status, reply.text
        message = reply.json()["error"]["message"]
        assert words in message, message
        assert "Remedy" in message
        assert str(folder) not in message
    await loaded(client)
    full = await client.post("/admin/adapters", json={"name": "x", "path": "one"})
    assert (full.status_code, full.json()["error"]["code"]) == (409, "too_many_adapters")
    assert (await client.delete("/admin/adapters/x")).status_code == 404
    lora = {"lora_name": "two", "lora_path": "two"}
    assert (await client.post("/v1/load_lora_adapter", json=lora)).status_code == 400
    gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert gone.text == "Success: LoRA adapter 'two' removed successfully."
    assert (await client.post("/v1/load_lora_adapter", json=lora)).status_code == 200
    engine, ask = adapting.engine, Ask(TEXTS[3], [], count=12)
    for name in ADAPTERS:
        found = await read(await begin(engine, ask, adapter=name))
        assert found.token_ids == adapted.tokens(engine, ask, name)
