"""Choice of the number of threads, on a simulated machine with a clock and other programs."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable

import pytest

from vsched_workers.backends.cpu.threads import (
    BLIND_MAX_S,
    LATELY_S,
    RETRY_MAX_S,
    RETRY_S,
    SLICE_S,
    CoreWaits,
    IdleCores,
    ThreadChoice,
    ThreadPool,
    waited_s,
)

pytest.importorskip("numba")


class Machine:
    """Cores, some of them busy with other programs, and a rank that runs steps."""

    def __init__(self, cores: int, *, noise: float = 0.0) -> None:
        self.cores, self.neighbours = cores, 0
        self.now_s = 0.0
        self.waited_s = 0.0
        self._noise = random.Random(7)
        self._spread = noise
        self.waits = CoreWaits(lambda: self.now_s, lambda: self.waited_s)
        self.choice = self.choose()

    def choose(self) -> ThreadChoice:
        """The choice of one more stage."""
        return ThreadChoice(
            self.cores, self.waits, now_s=lambda: self.now_s, idle_cores=self._idle_cores
        )

    def _idle_cores(self) -> float:
        return max(self.cores - self.choice.threads - self.neighbours, 0)

    def speed(self, threads: int) -> float:
        """Rows per second: a thread without its own core delays all others."""
        short = threads + self.neighbours - self.cores
        return 100.0 * (threads if short <= 0 else 0.3 * threads)

    def run(
        self, seconds: float, rows: Callable[[], int] = lambda: 4, kind: str = "generate"
    ) -> None:
        """Run steps for a number of seconds."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            threads, count = self.choice.next_threads, rows()
            taken_s = count / self.speed(threads)
            taken_s *= 1 + self._spread * self._noise.uniform(-1, 1)
            self.now_s += taken_s
            if threads + self.neighbours > self.cores:
                self.waited_s += 0.5 * taken_s
            self.waits.add_step(taken_s)
            self.choice.add_step(kind, count, taken_s)


def beside_a_program() -> Machine:
    """Return a machine that has computed on one of its two cores, next to a program on the other."""
    machine = Machine(2)
    machine.neighbours = 1
    machine.run(2.0)
    return machine


@pytest.mark.parametrize("cores", [2, 4])
def test_one_thread_less_next_to_a_neighbour_and_all_again_without(cores: int) -> None:
    machine = Machine(cores)
    machine.run(3.0)
    assert machine.choice.threads == cores
    machine.neighbours = 1
    machine.run(2.0)
    assert machine.choice.threads == cores - 1
    machine.run(30.0)
    assert machine.choice.threads == cores - 1
    machine.neighbours = 0
    machine.run(1.5)
    assert machine.choice.threads == cores


def test_each_stage_has_its_own_number_of_threads() -> None:
    """Next to a neighbour the encoder gains from the second thread, decoding does not; their steps alternate."""
    machine = Machine(2)
    generate, encode = machine.choice, machine.choose()
    decoding = machine.speed
    machine.neighbours = 1
    for _ in range(200):
        machine.choice, machine.speed = generate, decoding  # type: ignore[method-assign]
        machine.run(0.2)
        machine.choice, machine.speed = encode, lambda threads: 1000.0 + 400 * threads  # type: ignore[method-assign]
        machine.run(0.2, lambda: 1000)
    assert (generate.threads, encode.threads) == (1, 2)


def test_a_stage_that_pauses_does_not_count_in_the_reported_number() -> None:
    """Without images, an encoder's number is of the past."""
    pool = ThreadPool()
    pool.threads = 2
    pool.adapt()
    for stage in ("encode", "generate"):
        with pool.computing(stage, 1, torch_threads=1):
            pass
    encode = pool._choices["encode"]
    encode.threads = 1
    assert pool.active == 1
    encode.ended_s -= LATELY_S + 1
    assert pool.active == 2


def test_steps_of_any_size_are_compared_by_the_row() -> None:
    sizes = random.Random(3)
    machine = Machine(2, noise=0.1)
    machine.neighbours = 1
    machine.run(20.0, lambda: sizes.choice([64, 200, 1000]))
    assert machine.choice.threads == 1


def test_noise_changes_nothing() -> None:
    machine = Machine(2, noise=0.3)
    for _ in range(100):
        machine.waited_s += 1  # trials happen as often as allowed
        machine.run(0.5)
        assert machine.choice.threads == 2


@pytest.mark.parametrize(
    ("idle_cores", "step_s", "trials_max"),
    [(1.0, 0.04, 1000 * 0.3 / RETRY_MAX_S + 100 * RETRY_S), (None, 0.1, 1000 * 0.4 / BLIND_MAX_S)],
    ids=["a core looks idle", "none does"],
)
def test_trials_that_change_nothing_become_rare(
    idle_cores: float | None, step_s: float, trials_max: float
) -> None:
    """Cores may be idle because of a quota or other ranks, so that more threads cannot use them."""
    machine = beside_a_program()
    if idle_cores is not None:
        machine.choice._idle_cores = lambda: idle_cores
    together = 0
    for _ in range(1000):
        machine.run(step_s)
        together += machine.choice.next_threads == 2
    assert machine.choice.threads == 1
    assert together < trials_max


def test_more_threads_are_tried_when_no_core_looks_idle() -> None:
    """A program of the idle scheduling class keeps a core busy and yields it at once."""
    machine = beside_a_program()
    machine.choice._idle_cores = lambda: 0.0
    machine.neighbours = 0
    machine.run(3.0)
    assert machine.choice.threads == 2


def test_waiting_between_steps_starts_no_trial() -> None:
    machine = Machine(2)
    machine.run(1.0)
    for _ in range(100):
        machine.now_s += 1.0
        machine.waited_s += 0.5
        for _ in range(3):
            machine.run(0.03)
            assert machine.choice.next_threads == 2


def test_steps_that_cannot_be_compared_change_nothing() -> None:
    count = iter(range(10_000))
    machine = Machine(2)
    machine.neighbours = 1
    for _ in range(500):
        machine.run(0.01, kind=f"images {next(count)}")
    assert machine.choice.threads == 2


def test_niced_programs_count_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1})
    lines = "cpu 0 0 0 0\ncpu0 9 9 9 9\ncpu1 5000 {} 10 300\n"
    times = iter((0, 700))
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(lines.format(next(times))))
    cores = IdleCores()
    cores._at_s -= 7.0
    assert cores() == pytest.approx(700 / os.sysconf("SC_CLK_TCK") / 7, rel=0.05)


def test_systems_without_files_of_times_report_no_idle_cores_and_count_context_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise OSError

    assert IdleCores()() >= 0
    assert waited_s() >= 0
    monkeypatch.setattr("builtins.open", nothing)
    assert IdleCores()() == float("inf")
    assert waited_s() % SLICE_S == pytest.approx(0, abs=1e-6) or waited_s() >= SLICE_S
