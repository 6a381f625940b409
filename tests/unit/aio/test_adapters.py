"""The adapters that requests may name, and how groups that come and go all load them."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.patience import until
from tests.unit.aio.ranks import ITEM, ShellHarness
from tests.unit.media.fakes import FakePreprocessor, model_info
from vsched.aio.adapters import AdapterHold, AdapterTable, ServedAdapter, with_adapter
from vsched.aio.streams import TokenStream
from vsched.aio.worker_groups import ServedGroup, ServedGroups
from vsched.config import Config
from vsched.config.sections import AdaptersConfig, DeadlinesConfig, ModelConfig
from vsched.errors import CheckpointError, RequestRefused
from vsched.record.journal import PartialOutput, prompt_digest
from vsched.testing import make_request
from vsched.wire import AddAdapter, RemoveAdapter
from vsched.worker.contract import AdapterFacts


class FakeLeader:
    """Replies for the ranks of a group: with `errors`, at once unless `silent`."""

    def __init__(self) -> None:
        self.has: set[int] = set()
        self.errors = [""]
        self.silent = False
        self.refused: list[str] = []
        self.waiting: list[asyncio.Future[list[str]]] = []

    def change_adapters(self, entry: AddAdapter | RemoveAdapter) -> asyncio.Future[list[str]]:
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        if self.silent:
            self.waiting.append(done)
        elif isinstance(entry, RemoveAdapter):
            self.has.discard(entry.number)
            done.set_result([""])
        else:
            if not any(self.errors):
                self.has.add(entry.number)
            done.set_result(self.errors)
        return done

    def refuse(self, _rank: int, what: str) -> None:
        self.refused.append(what)

    def lose(self) -> None:
        for done in self.waiting:
            done.cancel()


class FakeGroup:
    """A group that is up."""

    def __init__(self, name: str) -> None:
        self.name, self.stage = name, name.partition("-")[0]
        self.leader = FakeLeader()
        self.state = "up"


class Bench:
    """A table over an encode group and two generate groups; every adapter has these `facts`."""

    def __init__(self, folder: Path, *, drain_s: float = 60.0, **adapters: Any) -> None:
        self.all = [FakeGroup(name) for name in ("encode", "generate-0", "generate-1")]
        self.folder = folder
        self.facts: AdapterFacts | Exception = AdapterFacts(4)
        limits: dict[str, Any] = {"count_max": 2, "rank_max": 8, "encoder": True, "load_s": 60.0}
        config = Config(
            model=ModelConfig(name="base"),
            adapters=AdaptersConfig(directory=str(folder / "adapters"), **(limits | adapters)),
            deadlines=DeadlinesConfig(drain_s=drain_s),
        )
        groups = cast("ServedGroups", self)
        self.table = AdapterTable(config, groups, self.keep, kept_in=str(folder / "kept"))

    def of_stage(self, stage: str) -> list[FakeGroup]:
        return [group for group in self.all if group.stage == stage]

    def who_has(self, number: int) -> list[str]:
        return [group.name for group in self.all if number in group.leader.has]

    def restore(self, group: FakeGroup) -> None:
        self.table.restore_adapters(cast("ServedGroup", group))

    def keep(self, path: str, kept: str) -> AdapterFacts:
        Path(kept).mkdir(parents=True)
        Path(kept, "copy").write_text(path)
        if isinstance(self.facts, Exception):
            raise self.facts
        return self.facts

    def kept(self) -> list[str]:
        folder = self.folder / "kept"
        return sorted(one.name for one in folder.iterdir()) if folder.exists() else []

    def loading(self, name: str = "a") -> asyncio.Task[None]:
        return asyncio.create_task(self.table.load_adapter(name, "somewhere"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_adapters_reach_all_groups_of_their_stages(bench: Bench) -> None:
    """Each with a number of its own, also one that is loaded again."""
    await bench.table.load_adapter("a", "somewhere")
    assert bench.who_has(1) == ["generate-0", "generate-1"]
    bench.facts = AdapterFacts(4, changes_encoder=True)
    for number in (2, 3):
        await bench.table.load_adapter("b", "somewhere")
        hold = bench.table.hold_adapter("b")
        hold.release()
        assert hold.number == number
        assert bench.who_has(number) == ["encode", "generate-0", "generate-1"]
        assert bench.kept() == ["1", str(number)]
        await bench.table.unload("b")
        assert bench.who_has(number) == []
    assert bench.kept() == ["1"]


async def test_adapter_that_one_rank_cannot_add_is_taken_away_from_all(bench: Bench) -> None:
    bench.all[2].leader.errors = ["", "shapes differ"]
    with pytest.raises(RequestRefused, match="generate-1: shapes differ"):
        await bench.table.load_adapter("a", "somewhere")
    assert bench.who_has(1) == []
    bench.restore(bench.all[1])
    assert bench.who_has(1) == [], "it is not stored"


async def test_adapter_that_is_not_added_by_the_deadline_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, load_s=0.01)
    silent = bench.all[1].leader
    silent.silent = True
    adding = bench.loading()
    await until(lambda: len(silent.waiting) == 2, "it is ordered to remove the adapter")
    silent.lose()
    with pytest.raises(RequestRefused, match="adapters.load_s"):
        await adding
    assert bench.who_has(1) == []


async def test_group_that_was_lost_meanwhile_gets_the_adapter_when_it_is_back(bench: Bench) -> None:
    lost = bench.all[1]
    lost.leader.silent = True
    adding = bench.loading()
    await until(lambda: bool(lost.leader.waiting), "it gets the order")
    old, lost.state, lost.leader = lost.leader, "down", FakeLeader()
    old.lose()
    await adding
    assert bench.who_has(1) == ["generate-1"]
    lost.state = "up"
    bench.restore(lost)
    assert bench.who_has(1) == ["generate-0", "generate-1"]


async def test_group_that_is_back_while_others_add_gets_the_adapter(bench: Bench) -> None:
    """Restoring a group does not cover an adapter that is still being added."""
    bench.all[1].state = "down"
    slow = bench.all[2].leader
    slow.silent = True
    adding = bench.loading()
    await until(lambda: bool(slow.waiting), "the other group gets the order")
    bench.all[1].state = "up"
    slow.waiting[0].set_result([""])
    await adding
    assert 1 in bench.all[1].leader.has


async def test_adapter_needs_a_group_of_each_stage(bench: Bench) -> None:
    bench.facts = AdapterFacts(4, changes_encoder=True)
    bench.all[0].state = "down"
    with pytest.raises(RequestRefused, match="no encode group is up"):
        await bench.table.load_adapter("a", "somewhere")
    assert bench.who_has(1) == []


async def test_group_that_does_not_get_its_adapters_back_is_given_up(bench: Bench) -> None:
    group = bench.all[1]
    await bench.table.load_adapter("a", "somewhere")
    group.leader = FakeLeader()
    group.leader.errors = ["no memory"]
    bench.restore(group)
    await until(lambda: bool(group.leader.refused), "the group is refused")
    assert group.leader.refused == ["could not add an adapter again: no memory"]


async def test_table_keeps_nothing_of_an_adapter_that_cannot_be_loaded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, encoder=False)
    bench.facts = CheckpointError("damaged. Remedy: another.")
    with pytest.raises(RequestRefused, match="damaged") as refused:
        await bench.table.load_adapter("a", str(tmp_path))
    assert (refused.value.code, refused.value.status) == ("adapter_unusable", 400)
    with pytest.raises(RequestRefused, match="no folder 'somewhere'") as refused:
        await bench.table.load_adapter("a", str(tmp_path / "somewhere"))
    assert (refused.value.code, refused.value.status) == ("adapter_not_found", 404)
    bench.facts = AdapterFacts(4, changes_encoder=True)
    with pytest.raises(RequestRefused, match="adapters.encoder"):
        await bench.table.load_adapter("a", "somewhere")
    assert (bench.table.rows(), bench.kept()) == ([], [])


@pytest.mark.parametrize(
    ("name", "code"),
    [("base", "name_taken"), ("a", "name_taken"), ("", "invalid_name"), ("x\n", "invalid_name")],
)
async def test_table_refuses_names(bench: Bench, name: str, code: str) -> None:
    await bench.table.load_adapter("a", "somewhere")
    with pytest.raises(RequestRefused) as refused:
        await bench.table.load_adapter(name, "somewhere")
    assert refused.value.code == code


async def test_table_counts_those_that_are_on_their_way(bench: Bench) -> None:
    loads = [bench.table.load_adapter(name, "somewhere") for name in "abc"]
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert [getattr(each, "code", "") for each in outcomes] == ["", "", "too_many_adapters"]


@pytest.mark.parametrize("path", ["..", ".", "", "/etc", "../kept/1", "a/../..", "a\0b"])
def test_table_takes_no_path_outside_the_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "link").symlink_to("/etc")
    table = Bench(tmp_path).table
    for wanted in (path, "link"):
        with pytest.raises(RequestRefused, match="below adapters.directory"):
            table.path_of(wanted)
    assert table.path_of("a/b") == str(tmp_path / "adapters" / "a" / "b")


async def test_table_unloads_after_the_last_user(bench: Bench) -> None:
    await bench.table.load_adapter("a", "somewhere")
    first, second = bench.table.hold_adapter("a"), bench.table.hold_adapter("a")
    second.mark_running(lambda message: pytest.fail(message))
    gone = asyncio.ensure_future(bench.table.unload("a"))
    await until(lambda: bench.table.rows()[0]["state"] == "unloading", "it is being unloaded")
    for name in ("a", "b"):
        with pytest.raises(RequestRefused, match="no adapter"):
            bench.table.hold_adapter(name)
    first.release()
    await asyncio.sleep(0)
    assert not gone.done()
    assert bench.who_has(1)
    second.release()
    await gone
    assert (bench.who_has(1), bench.table.rows()) == ([], [])


async def test_table_interrupts_late_requests(tmp_path: Path) -> None:
    """A request that is still being prepared is refused when it would be submitted."""
    bench = Bench(tmp_path, drain_s=0.0)
    await bench.table.load_adapter("a", "somewhere")
    running, prepared = bench.table.hold_adapter("a"), bench.table.hold_adapter("a")
    said: list[str] = []
    running.mark_running(said.append)
    await bench.table.unload("a")
    assert "deadlines.drain_s" in said[0]
    with pytest.raises(RequestRefused, match="no adapter"):
        prepared.mark_running(said.append)
    running.release()


async def test_table_continues_without_waiters(bench: Bench) -> None:
    """The caller may leave: the adapter is loaded or not, never half-way."""
    loading = bench.loading()
    await asyncio.sleep(0)
    loading.cancel()
    await until(lambda: [row["state"] for row in bench.table.rows()] == ["ready"], "it is loaded")


async def test_items_of_an_adapter_that_changes_the_encoder_have_other_keys(bench: Bench) -> None:
    bench.facts = AdapterFacts(4, changes_encoder=True)
    await bench.table.load_adapter("a", "somewhere")
    await bench.table.load_adapter("b", "somewhere")
    items = [(0, 2, b"one"), (1, 2, b"two")]
    request = make_request("r", [1, 2], items, encoded=[b"two"])
    one, other = (with_adapter(request, bench.table.hold_adapter(name)) for name in "ab")
    keys: list[Any] = [[item.key for item in each.items] for each in (request, one, other)]
    assert len({first for first, _ in keys}) == 3
    assert {second for _, second in keys} == {b"two"}, "the client has encoded it"
    assert [item.adapter for item in one.items] == [1, 0]
    assert (one.adapter, other.adapter) == (1, 2)


async def test_resumed_request_has_the_image_keys_of_its_adapter(played: ShellHarness) -> None:
    """As in the record of the engine that died; otherwise its prompt would seem to have changed."""
    adapter = ServedAdapter("a", 1, "somewhere")
    adapter.facts = AdapterFacts(4, changes_encoder=True)
    engine = played.engine()
    engine.info = model_info(context_tokens=64)
    table = cast("Any", SimpleNamespace(hold_adapter=lambda _: AdapterHold(adapter)))
    assert engine._running is not None
    engine._running = dataclasses.replace(engine._running, adapters=table)
    wanted = make_request("r", list(range(10)), items=[ITEM], max_tokens=5)
    lease = SimpleNamespace(release=lambda: None)

    async def prepare(_: object) -> Any:
        return SimpleNamespace(token_ids=wanted.prompt_token_ids, items=wanted.items, lease=lease)

    accept = partial(
        engine.accept,
        msgspec.structs.replace(wanted, prompt_token_ids=[], items=()),
        ("r",),
        adapter="a",
        images=1,
        prepare=prepare,
        make_answer=partial(
            TokenStream, make_detokenizer=FakePreprocessor(engine.info).detokenizer
        ),
    )
    (first,) = await accept()
    (live,) = played.shell.kernel.requests
    started = PartialOutput(prompt_digest(live.request), (3,))
    first.abort()
    (second,) = await accept(started=started)
    assert second.output_tokens == 1
    second.abort()
