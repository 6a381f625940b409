"""A recorded run as a workload: the recorded figures again with its own policy, and others with another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.unit.sim.shapes import COST, arrival, config
from vsched.config import LoadedConfig, load_config
from vsched.errors import RecordError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command
from vsched.kernel.events import Event, Submitted
from vsched.record import Recorder, open_recorder
from vsched.sim import CostModel, TraceError, load_trace
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.fast.recorded import RecordedRun, load_record
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Arrival, Image, Reply, Text, Workload, workload_of

SMALL = (
    "generate.slots=4",
    "generate.block_size=4",
    'generate.memory={use="pinned", tokens=800}',
    "generate.step_target_ms=0",
)


class Observed:
    def __init__(self, configured: LoadedConfig) -> None:
        self.configured = configured
        self.recorder: Recorder | None = None
        self.submitted: list[Submitted] = []

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        if self.recorder is None:
            self.recorder = open_recorder(self.configured.config, kernel)
            assert self.recorder is not None
        if isinstance(event, Submitted):
            self.submitted.append(event)
        self.recorder.record_event(event, now_ns, commands)


def record(
    folder: Path,
    workload: Workload,
    observed: type[Observed] = Observed,
    cost: CostModel = COST,
) -> tuple[SimulationOutcome, RecordedRun, list[Submitted]]:
    """Simulate a workload, record it, and read the record."""
    path = folder / "run.vlog"
    configured = config(*SMALL, f"record.path={path}")
    seen = observed(configured)
    outcome = simulate(configured, workload, cost=cost, observers=[seen])
    assert seen.recorder is not None
    seen.recorder.close()
    return outcome, load_record(path), seen.submitted


def again(run: RecordedRun, *sets: str, **options: object) -> SimulationOutcome:
    configured = load_config(None, sets=sets, environ={}, base=run.config)
    return simulate(configured, run.workload, **{"cost": COST, **options})  # type: ignore[arg-type]


def load(*, leaving: bool = False) -> Workload:
    """Return requests with images, shared texts, two tenants, and targets, more than the slots serve at once."""
    rng = Random(1)
    return workload_of(
        "mixed",
        [
            arrival(
                number,
                number * 6.0,
                Text(rng.randrange(3), rng.randint(9, 40)),
                *[Image(f"image {rng.randrange(4)}", 30) for _ in range(number % 2)],
                Text(100 + number, rng.randint(1, 20)),
                outputs=rng.choice((2, 4, 60)),
                tenant=f"tenant {number % 2}",
                cache_salt="",
                priority=number % 3,
                ttft_target_ms=100,
                max_tokens=80,
                leaves_ns=rng.randrange(50_000_000) if leaving and number % 4 == 0 else None,
            )
            for number in range(90)
        ],
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulationOutcome, RecordedRun]:
    return record(tmp_path_factory.mktemp("recorded"), load())[:2]


def test_recorded_run_simulates_to_its_own_figures(
    recorded: tuple[SimulationOutcome, RecordedRun],
) -> None:
    outcome, run = recorded
    assert run.measured.ttft_ms == outcome.figures.ttft_ms
    assert run.measured.tpot_ms == outcome.figures.tpot_ms
    same = again(run)
    for name in ("finished", "ttft_ms", "itl_ms", "tpot_ms", "prefix_hits", "embedding_hits"):
        assert getattr(same.figures, name) == getattr(outcome.figures, name), name
    assert same.figures.tenants == outcome.figures.tenants


def test_recorded_steps_have_about_their_costs(
    recorded: tuple[SimulationOutcome, RecordedRun],
) -> None:
    outcome, run = recorded
    assert run.cost is not None
    assert run.kv_tokens == 800
    assert run.cost.bytes_per_token == COST.bytes_per_token
    fitted = again(run, cost=run.cost, info=COST.shape)
    for name in ("ttft_ms", "tpot_ms"):
        for quantile in ("p50", "p95"):
            wanted = getattr(getattr(outcome.figures, name), quantile)
            found = getattr(getattr(fitted.figures, name), quantile)
            assert found == pytest.approx(wanted, rel=0.05)


def test_recorded_steps_that_slowed_each_other_down_take_their_time_once(tmp_path: Path) -> None:
    """The fitted steps have the mean of their times, alone and next to others, and are not slowed down again."""
    host = msgspec.structs.replace(COST.host, contention=(1.0, 2.0))
    requests = []
    for one in load():
        prompt = (Image(one.request_id, 60), *one.prompt)
        requests.append(msgspec.structs.replace(one, at_ns=2 * one.at_ns, prompt=prompt))
    cost = msgspec.structs.replace(COST, host=host)
    outcome, run, _ = record(tmp_path, workload_of("images", requests), cost=cost)
    fitted = again(run, cost=run.cost, info=COST.shape).figures
    for name in ("generate_busy", "encode_busy"):
        wanted = getattr(outcome.figures, name) * outcome.figures.span_s
        assert getattr(fitted, name) * fitted.span_s == pytest.approx(wanted, rel=0.05)
    assert fitted.ttft_ms.p50 == pytest.approx(outcome.figures.ttft_ms.p50, rel=0.25)


def test_clients_that_left_leave_again(tmp_path: Path) -> None:
    outcome, run, _ = record(tmp_path, load(leaving=True))
    left = outcome.figures.failed["abort"]
    assert left > 10
    lost = sum(run.measured.failed.values()) - run.measured.failed["abort"]
    same = again(run, oracles=True).figures
    assert same.failed == {"abort": left - lost}
    assert same.finished == outcome.figures.finished
    assert same.ttft_ms.p50 == pytest.approx(outcome.figures.ttft_ms.p50, rel=0.05)


def test_requests_keep_the_fields_that_policies_see(tmp_path: Path) -> None:
    two = [
        arrival(0, 5.0, tenant="a", priority=2, ttft_target_ms=70, adapter="one", max_tokens=9),
        arrival(1, 8.0, Text(7, 3), Image("cat", 12), Text(8, 2), outputs=3, cache_salt="s"),
    ]
    _, run, submitted = record(tmp_path, workload_of("two", two))
    first, second = run.workload
    assert (first.at_ns, second.at_ns) == (0, 3_000_000)
    assert (first.tenant, first.priority, first.ttft_target_ms) == ("a", 2, 70)
    assert (first.adapter, first.max_tokens, first.output_tokens) == ("adapter-1", 9, 4)
    assert first.salt == "a"
    assert second.salt == "s"
    assert second.images == [Image(submitted[1].request.items[0].key.hex(), 12)]
    assert second.prompt_tokens == 17


def test_turns_repeat_the_reply_and_follow_the_turn_before(tmp_path: Path) -> None:
    first = arrival(0, 0.0, Text(5, 13), outputs=20, conversation="c")
    said = (*first.prompt, Reply(20), Text(6, 9))
    turns = [first, arrival(1, 500.0, *said, outputs=3, conversation="c")]
    outcome, run, _ = record(tmp_path, workload_of("turns", turns))
    second = list(run.workload)[1]
    assert Reply(20) in second.prompt
    assert second.conversation == "c"
    assert 0 < second.think_ns < 500_000_000
    assert outcome.figures.prefix_hits > 0.4
    assert again(run).figures.prefix_hits == outcome.figures.prefix_hits


def test_requests_of_a_session_at_the_same_time_are_no_turns(tmp_path: Path) -> None:
    requests = [arrival(n, n, outputs=30, conversation=f"c{n}") for n in (0, 1)]

    class OneSession(Observed):
        def see(self, now_ns: int, event: Event, *more: object) -> None:
            if isinstance(event, Submitted):
                request = msgspec.structs.replace(event.request, session="c")
                event = msgspec.structs.replace(event, request=request)
            super().see(now_ns, event, *more)  # type: ignore[arg-type]

    first, second = record(tmp_path, workload_of("apart", requests), OneSession)[1].workload
    assert first.conversation == "c"
    assert second.conversation not in {"", "c"}


def test_record_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.vlog"
    with pytest.raises(RecordError, match="no such record"):
        load_record(path)
    configured = config(*SMALL, f"record.path={path}")
    seen = Observed(configured)
    simulate(configured, workload_of("none", list[Arrival]()), cost=COST, observers=[seen])
    with pytest.raises(RecordError, match="no requests"):
        load_record(path)
    with pytest.raises(TraceError, match="load_record"):
        load_trace(path)
