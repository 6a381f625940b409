"""Groups of two ranks, two of each stage: equal to one rank, and to themselves when ranks are lost.

Small by default. `VSCHED_REQUESTS=200` asks that number of questions of a larger model, with every fault in every
stage.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from tests.e2e import faulty_plugin
from tests.e2e.asking import TEXTS, Answer, Ask, begin, drawn_image, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.patience import PATIENCE_S, patience, until
from tests.traces import is_alive, parent, running
from vsched import Config, Engine, SamplingParams
from vsched.aio.streams import Generation
from vsched.errors import RequestFailed, VschedError

REQUESTS = int(os.environ.get("VSCHED_REQUESTS", "0"))
SEED = int(os.environ.get("VSCHED_SEED", "5"))
SIZE = "tiny25" if REQUESTS else "nano25"
DRAWN = 24 if REQUESTS else 8
FAULTS = 8 if REQUESTS else 2
LIMIT_S = (3 if REQUESTS else 1) * PATIENCE_S

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * LIMIT_S),
    pytest.mark.slow,
]

GROUPS = (
    "encode.replicas=2",
    "encode.tensor_parallel=2",
    "generate.replicas=2",
    "generate.tensor_parallel=2",
    f"encode.plugin={faulty_plugin.NAME}",
    f"generate.plugin={faulty_plugin.NAME}",
    # Nothing is kept, so the encoders never run out of work.
    "encode.eviction.use=none",
    "deadlines.rank_timeout_s=6",
)
DRAWS = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias=((40, 2.0), (41, -100.0)),
    bad_words=((45,), (40, 46)),
    min_tokens=10,
    max_tokens=60,
    ignore_eos=True,
)
KILL, HANG = signal.SIGKILL, signal.SIGSTOP
OTHER_LOG, OTHER_RESULT = faulty_plugin.OTHER_LOG, faulty_plugin.OTHER_RESULT
SEEN_AS = {
    # A decision may find the rank gone before the engine gets the exit of its child.
    KILL: ("killed by SIGKILL", "is gone"),
    HANG: ("deadlines.", "was silent"),
    OTHER_LOG: ("RankDesync",),
    OTHER_RESULT: ("RankDesync",),
}
"""Parts of the reason of the loss; one of them must be there."""


# --- questions ---


@dataclass(frozen=True)
class Question:
    """A question, and the tokens of its answer from one rank."""

    ask: Ask
    sampling: SamplingParams | None
    tokens: list[int]


async def read(generation: Generation) -> Answer:
    """Read to the end, for as long as groups may take to come back."""
    async with patience(LIMIT_S):
        return Answer([delta async for delta in generation])


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def questions(configure: Callable[..., Config]) -> list[Question]:
    """Return 16 greedy questions and some sampled ones, with the answers of a single undisturbed rank."""
    requested: list[tuple[Ask, SamplingParams | None]] = [(ask, None) for ask in mixed_asks()]
    for number, ask in enumerate(mixed_asks()[:DRAWN]):
        requested.append((ask, msgspec.structs.replace(DRAWS, seed=number)))
    async with Engine(configure(SIZE, "placement=together")) as alone:
        found = [await read(await begin(alone, ask, sampling)) for ask, sampling in requested]
    return [
        Question(ask, sampling, each.token_ids)
        for (ask, sampling), each in zip(requested, found, strict=True)
    ]


class Load:
    """Clients that ask one question after the other, and compare each answer."""

    def __init__(self, engine: Engine, questions: Sequence[Question]) -> None:
        self.tokens = 0
        self.answered = 0
        self._engine = engine
        self._questions = questions
        self._over = asyncio.Event()

    async def run(self, requests: int, *, clients: int) -> None:
        """Ask at least this number of questions, and continue until `end`."""
        numbers = count()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(numbers, requests))

    async def more(self, tokens: int) -> None:
        """Wait for a number of further tokens."""
        enough = self.tokens + tokens
        await patiently(lambda: self.tokens >= enough, "tokens come")

    def end(self) -> None:
        """Ask nothing after the minimum number of questions."""
        self._over.set()

    async def _client(self, numbers: Iterator[int], requests: int) -> None:
        while (number := next(numbers)) < requests or not self._over.is_set():
            question = self._questions[number % len(self._questions)]
            await self._check(question, await begin(self._engine, question.ask, question.sampling))

    async def _check(self, question: Question, generation: Generation) -> None:
        answer = Answer()
        async with patience(LIMIT_S):
            async for delta in generation:
                answer.deltas.append(delta)
                self.tokens += len(delta.token_ids)
        assert answer.token_ids == question.tokens
        assert answer.text == self._engine.preprocessor.detokenize(question.tokens)
        assert answer.finish_reason == "length"
        self.answered += 1


# --- groups, and their faults ---


class Fault(NamedTuple):
    """A signal to a rank."""

    number: signal.Signals
    group: str
    rank: int


def row(engine: Engine, group: str) -> dict[str, Any]:
    """An operator's view of a group."""
    return next(each for each in engine.groups() if each["name"] == group)


def pids(engine: Engine, group: str) -> list[int]:
    return [rank["pid"] for rank in row(engine, group)["ranks"]]


def all_up(engine: Engine) -> bool:
    return all(each["state"] == "up" for each in engine.groups())


patiently = functools.partial(until, limit_s=LIMIT_S)


def planned(rng: random.Random) -> list[Fault]:
    """Return every fault for every stage: first each fault once, in alternating stages."""
    faults = list(SEEN_AS)
    rng.shuffle(faults)
    stages = ["encode", "generate"]
    rng.shuffle(stages)
    chosen = []
    for turn, number in enumerate([*faults, *faults]):
        stage = stages[(turn + turn // len(faults)) % 2]
        # The first rank's result counts as true; a stage's replicas take turns, so none is lost too often.
        rank = 1 if number == OTHER_RESULT else rng.randrange(2)
        chosen.append(Fault(number, f"{stage}-{turn // 2 % 2}", rank))
    return chosen


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def groups(configure: Callable[..., Config]) -> AsyncIterator[Engine]:
    """Eight ranks: two groups of two for each stage."""
    async with Engine(configure(SIZE, *GROUPS)) as engine:
        yield engine
        await assert_idle(engine)
        every = engine.rank_pids
    assert not any(map(is_alive, every))


# --- invariants ---


async def test_groups_of_ranks_equal_one_rank(groups: Engine, questions: list[Question]) -> None:
    """Mixed requests, eight ranks, preempted now and then; each replica had its share."""
    load = Load(groups, questions)
    load.end()
    await load.run(REQUESTS or len(questions), clients=16)
    assert load.answered == (REQUESTS or len(questions))
    drawn = {tuple(one.tokens[:16]) for one in questions if one.sampling}
    assert len(drawn) == DRAWN, "equality proves nothing"
    statistics = groups.statistics()
    for stage in ("encode", "generate"):
        busy = [statistics["busy_ms"][f"{stage}-{index}"] for index in range(2)]
        assert min(busy) > 0, busy
    assert statistics["generate"]["preemptions"] > 0, "the KV cache was not small enough"


async def test_groups_lose_no_token_to_faults(groups: Engine, questions: list[Question]) -> None:
    """Ranks of each kind exit, hang and diverge at random moments under load."""
    rng = random.Random(SEED)
    load = Load(groups, questions)

    async def strike() -> None:
        for fault in planned(rng)[:FAULTS]:
            await load.more(rng.randint(50, 400))
            await lose(groups, fault)
        load.end()

    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(REQUESTS or len(questions), clients=6))
        group.create_task(strike())
    assert load.answered >= (REQUESTS or len(questions))


async def lose(engine: Engine, fault: Fault) -> None:
    """Signal a rank, and wait until its group, and no other, has been lost and is back."""
    before = {each["name"]: each["restarts"] for each in engine.groups()}
    os.kill(pids(engine, fault.group)[fault.rank], fault.number)
    await patiently(lambda: row(engine, fault.group)["state"] == "down", f"{fault} is noticed")
    assert engine.state == "degraded"
    await patiently(lambda: all_up(engine), f"{fault.group} is back")
    after = {each["name"]: each["restarts"] - before[each["name"]] for each in engine.groups()}
    assert after == {name: int(name == fault.group) for name in after}
    reason = row(engine, fault.group)["last_loss"]["reason"]
    assert any(words in reason for words in SEEN_AS[fault.number]), reason


@pytest.mark.thorough
async def test_groups_survive_two_faults_at_once_and_one_while_they_recover(
    groups: Engine, questions: list[Question]
) -> None:
    """No generate group is left; then one of them is lost again while it loads."""
    started = [await begin(groups, one.ask, one.sampling) for one in questions[-8:]]
    await patiently(lambda: sum(one.output_tokens for one in started) > 40, "streams are running")
    lost = {group: pids(groups, group) for group in ("generate-0", "generate-1")}
    for ranks in lost.values():
        os.kill(ranks[1], KILL)
    again = lost["generate-0"]
    await patiently(lambda: not {*again, 0} & {*fresh(groups, "generate-0")}, "ranks start again")
    os.kill(pids(groups, "generate-0")[0], KILL)
    found = await asyncio.gather(*(read(one) for one in started))
    assert [one.token_ids for one in found] == [one.tokens for one in questions[-8:]]
    await patiently(lambda: all_up(groups), "both are back")


def fresh(engine: Engine, group: str) -> list[int]:
    """Return the ranks of a group, [0] while it has none."""
    return pids(engine, group) or [0]


def started_ranks() -> set[int]:
    """Return the children of this process that are not servers of isolated calls."""
    servers = (b"vsched: grammars", b"vsched: pictures", b"grammar_server", b"pictures.server")

    def is_server(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            return True
        return any(name in line for name in servers)

    return {pid for pid in children() if not is_server(pid)}


@pytest.mark.parametrize("number", [KILL, HANG], ids=["killed", "hung"])
async def test_group_that_loses_a_rank_while_it_starts_serves_or_reports_why(
    configure: Callable[..., Config], questions: list[Question], number: signal.Signals
) -> None:
    """Never a hang, and no rank is left behind."""
    before = started_ranks()
    engine = Engine(
        configure(
            SIZE,
            "placement=together",
            "encode.tensor_parallel=2",
            "generate.tensor_parallel=2",
            # Only this deadline detects a rank that hangs.
            f"deadlines.ready_s={4 if number == HANG else 300}",
        )
    )
    starting = asyncio.create_task(engine.start())
    await patiently(lambda: len(started_ranks() - before) == 2, "both ranks are started")
    if number == KILL:
        await asyncio.sleep(random.Random(SEED).uniform(0, 2))  # at a random point of the start
    # A rank that is to hang does so at once: after its start, other deadlines apply, which take too long for a test.
    os.kill(max(started_ranks() - before), number)
    try:
        async with patience(LIMIT_S):
            error = await failure(starting)
        if error is None:
            one = questions[1]
            assert (await read(await begin(engine, one.ask))).token_ids == one.tokens
        else:
            assert "rank" in str(error) or "deadlines.ready_s" in str(error)
            assert "\n" not in str(error)
            assert engine.state == "stopped"
    finally:
        await engine.stop()
    await patiently(lambda: started_ranks() == before, "no rank is left")


async def failure(starting: asyncio.Task[None]) -> VschedError | None:
    try:
        await starting
    except VschedError as error:
        return error
    return None


def children() -> set[int]:
    return {pid for pid in running() if parent(pid) == os.getpid()}


@pytest.mark.skipif(not REQUESTS, reason="takes three losses of a group")
async def test_groups_end_a_poison_request_and_no_other(
    groups: Engine, questions: list[Question]
) -> None:
    """It takes down its own group, never another, and is not retried for ever."""
    before = {each["name"]: each["restarts"] for each in groups.groups()}
    load = Load(groups, questions)
    deadly = SamplingParams(seed=faulty_plugin.POISON_SEED, max_tokens=9, ignore_eos=True)
    poison = await begin(groups, Ask(TEXTS[0], [drawn_image(9)]), deadly)
    serving = asyncio.create_task(load.run(len(questions), clients=6))
    with pytest.raises(RequestFailed) as caught:
        await read(poison)
    assert caught.value.code == "group_lost"
    load.end()
    await serving
    await patiently(lambda: all_up(groups), "its group is back")
    lost = {each["name"]: each["restarts"] - before[each["name"]] for each in groups.groups()}
    assert sorted(lost.values())[:3] == [0, 0, 0], lost
    assert max(lost.values()) in {2, 3}, lost
