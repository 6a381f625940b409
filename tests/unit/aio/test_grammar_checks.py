"""Grammar checks, in threads and in processes: a grammar that crashes, loops or exhausts memory is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE_S
from tests.unit.rank.fake_plugin import FakePlugin
from vsched.aio.grammar_checks import GRAMMAR_BYTES_MAX, GrammarChecks, GrammarProcesses
from vsched.errors import RequestFailed, RequestRefused
from vsched.sim.ranks.symbolic_workers import stand_in_info
from vsched.types import ModelInfo, SamplingParams
from vsched.worker.contract import TokenMatcher


class Compiler:
    """Records the grammars it compiles and their threads; `going` blocks it."""

    pid = 0

    def __init__(self) -> None:
        self.seen: list[tuple[str, threading.Thread]] = []
        self.closed = False
        self.going = threading.Event()
        self.going.set()

    def check(self, grammar: str) -> None:
        self.going.wait()
        self.seen.append((grammar, threading.current_thread()))
        if grammar == "bad":
            raise RequestRefused("no. Remedy: none.", code="invalid_grammar")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def checks(compiler: Compiler) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(compiler, deadline_s=60)
    yield checks
    checks.close()
    assert compiler.closed


async def test_grammars_compile_outside_the_loop(compiler: Compiler, checks: GrammarChecks) -> None:
    """Refusals come back; a grammar that was accepted is not compiled again."""
    await checks.check_request(SamplingParams())
    for grammar in ("good", "other", "good"):
        await checks.check_request(SamplingParams(grammar=grammar))
    for _ in range(2):
        with pytest.raises(RequestRefused, match="no"):
            await checks.check_request(SamplingParams(grammar="bad"))
    assert [grammar for grammar, _ in compiler.seen] == ["good", "other", "bad", "bad"]
    assert threading.current_thread() not in [thread for _, thread in compiler.seen]


async def test_a_grammar_that_takes_too_long_is_refused_for_now(compiler: Compiler) -> None:
    compiler.going.clear()
    checks = GrammarChecks(compiler, deadline_s=0.01)
    with pytest.raises(RequestRefused, match=r"media\.prepare_s") as refusal:
        await checks.check_request(SamplingParams(grammar="slow"))
    assert refusal.value.status == 503
    compiler.going.set()
    checks.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(grammar="x" * (GRAMMAR_BYTES_MAX + 1)),
        SamplingParams(grammar="x", min_tokens=1),
        SamplingParams(grammar="x", bad_words=((1,),)),
    ],
)
async def test_unbounded_values_and_masks_of_every_token_are_refused(
    compiler: Compiler, checks: GrammarChecks, sampling: SamplingParams
) -> None:
    with pytest.raises(RequestRefused, match="Remedy") as refusal:
        await checks.check_request(sampling)
    assert (refusal.value.code, refusal.value.status) == ("invalid_grammar", 400)
    assert compiler.seen == []


async def test_a_model_without_grammars_refuses_them_and_nothing_else() -> None:
    checks = GrammarChecks(None, deadline_s=60)
    await checks.check_request(SamplingParams())
    with pytest.raises(RequestRefused, match="structured output is not supported"):
        await checks.check_request(SamplingParams(grammar="x"))
    checks.close()


class ShakyGrammars:
    """Crashes, loops, overflows its stack or raises in `check`, like native code with a bug."""

    def check(self, grammar: str) -> None:
        match grammar.split():
            case ["die", number]:
                os.kill(os.getpid(), int(number))
            case ["loop"]:
                while True:
                    pass
            case ["wait"]:
                signal.pause()
            case ["recurse"]:
                exec("f = lambda: f()\nf()")
            case ["refuse"]:
                raise RequestRefused("no. Remedy: none.", code="invalid_grammar")
            case ["quote"]:
                raise RequestRefused("no \ud800. Remedy: none.", code="invalid_grammar")
            case ["panic"]:
                raise SystemExit("as PanicException is no Exception")

    def matcher(self, grammar: str) -> TokenMatcher:
        raise NotImplementedError(grammar)


class ShakyPlugin(FakePlugin):
    """A plug-in with grammars, unless the model's family is `none`."""

    def load_grammars(self, info: ModelInfo) -> ShakyGrammars | None:
        return None if info.family == "none" else ShakyGrammars()


plugin = ShakyPlugin()


def processes_of(family: str) -> GrammarProcesses:
    info = stand_in_info(family=family)
    return GrammarProcesses(f"{__name__}:plugin", info, deadline_s=PATIENCE_S)


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    made = processes_of("shaky")
    assert made.pid == 0
    made.check("good")
    assert made.pid, "the server starts with the first check"
    yield made
    made.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (f"die {signal.SIGSEGV:d}", r"died \(SIGSEGV\).*64 MiB"),
        ("loop", "more than 1 s of CPU time"),
        pytest.param("wait", r"died \(SIGALRM\)", marks=[pytest.mark.slow, pytest.mark.thorough]),
        ("recurse", "cannot be used"),
        ("panic", "cannot be used"),
        ("refuse", "^no. Remedy"),
        ("quote", r"^no \\ud800. Remedy"),
    ],
)
def test_harmful_grammar_is_refused(processes: GrammarProcesses, grammar: str, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason) as refusal:
        processes.check(grammar)
    assert (refusal.value.code, refusal.value.status) == ("invalid_grammar", 400)
    assert "Remedy: " in refusal.value.message
    processes.check("fine")


def test_grammar_is_not_blamed_for_a_kill_from_outside(processes: GrammarProcesses) -> None:
    """For example by the kernel's OOM killer: the client may try again."""
    with pytest.raises(RequestFailed, match="try again") as failure:
        processes.check(f"die {signal.SIGKILL:d}")
    assert failure.value.status == 503


def test_grammar_has_deadline(processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_deadline_s", 0.05)
    with pytest.raises(RequestRefused, match=r"over 0\.05 s.*media\.prepare_s") as refusal:
        processes.check("loop")
    assert (refusal.value.code, refusal.value.status) == ("prepare_timeout", 503)


@pytest.mark.thorough
def test_grammar_processes_report_a_model_without_grammars() -> None:
    processes = processes_of("none")
    with pytest.raises(RequestRefused, match="byte-level tokenizer") as refusal:
        processes.check("any")
    assert refusal.value.code == "grammar_not_supported"
    processes.close()
