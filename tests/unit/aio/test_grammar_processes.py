"""Grammar checks in processes: a grammar that crashes, loops or exhausts memory is refused, and nothing else fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE_S
from tests.unit.rank.fake_plugin import FakePlugin
from vsched.aio.grammar_checks import GrammarProcesses
from vsched.errors import RequestFailed, RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import TokenMatcher


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


def model(family: str) -> ModelInfo:
    return ModelInfo(
        family=family,
        path="",
        dtype="float32",
        hidden_size=4,
        embedding_levels=1,
        vocab_size=64,
        context_tokens=64,
        kv_bytes_per_token=1,
        item_tokens_max=1,
        image_token_id=1,
        stop_token_ids=(2,),
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    made = GrammarProcesses(f"{__name__}:plugin", model("shaky"), deadline_s=PATIENCE_S)
    yield made
    made.close()


def test_grammar_server_starts_with_the_first_check() -> None:
    made = GrammarProcesses(f"{__name__}:plugin", model("shaky"), deadline_s=PATIENCE_S)
    try:
        assert made.pid == 0
        made.check("good")
        assert made.pid
    finally:
        made.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (f"die {signal.SIGSEGV:d}", r"died \(SIGSEGV\).*64 MiB"),
        (f"die {signal.SIGABRT:d}", r"died \(SIGABRT\)"),
        ("loop", "more than 1 s of CPU time"),
        pytest.param("wait", r"died \(SIGALRM\).*64 MiB", marks=pytest.mark.slow),
        ("recurse", "cannot be used"),
        ("panic", "cannot be used"),
        ("refuse", "^no. Remedy"),
        ("quote", r"^no \\ud800. Remedy"),
    ],
)
def test_grammar_processes_refuse_what_kills_them(
    processes: GrammarProcesses, grammar: str, reason: str
) -> None:
    with pytest.raises(RequestRefused, match=reason) as refusal:
        processes.check(grammar)
    assert (refusal.value.code, refusal.value.status) == ("invalid_grammar", 400)
    assert "Remedy: " in refusal.value.message
    processes.check("fine")


def test_grammar_processes_do_not_blame_a_grammar_for_a_kill_from_outside(
    processes: GrammarProcesses,
) -> None:
    """For example by the kernel's OOM killer: the client may try again."""
    with pytest.raises(RequestFailed, match="try again") as failure:
        processes.check(f"die {signal.SIGKILL:d}")
    assert failure.value.status == 503


def test_grammar_processes_name_the_deadline(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_deadline_s", 0.05)
    with pytest.raises(RequestRefused, match=r"over 0\.05 s.*media\.prepare_s") as refusal:
        processes.check("loop")
    assert (refusal.value.code, refusal.value.status) == ("prepare_timeout", 503)


def test_grammar_processes_survive_their_server(processes: GrammarProcesses) -> None:
    before = processes.pid
    os.kill(before, signal.SIGKILL)
    processes.check("fine")
    assert processes.pid != before


def test_grammar_processes_report_a_model_without_grammars() -> None:
    processes = GrammarProcesses(f"{__name__}:plugin", model("none"), deadline_s=PATIENCE_S)
    with pytest.raises(RequestRefused, match="byte-level tokenizer") as refusal:
        processes.check("any")
    assert refusal.value.code == "grammar_not_supported"
    processes.close()
