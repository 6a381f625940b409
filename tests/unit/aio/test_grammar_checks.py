from __future__ import annotations

import threading

import pytest

from vsched.aio.grammar_checks import GRAMMAR_BYTES_MAX, GrammarChecks
from vsched.errors import RequestRefused
from vsched.types import SamplingParams


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


async def test_grammars_compile_off_the_loop_and_refusals_come_back() -> None:
    compiler = Compiler()
    checks = GrammarChecks(compiler, deadline_s=60)
    await checks.check(SamplingParams())
    assert compiler.seen == []
    await checks.check(SamplingParams(grammar="good"))
    ((grammar, thread),) = compiler.seen
    assert grammar == "good"
    assert thread is not threading.current_thread()
    with pytest.raises(RequestRefused, match="no"):
        await checks.check(SamplingParams(grammar="bad"))
    checks.close()
    assert compiler.closed


async def test_grammar_that_was_accepted_is_not_compiled_again() -> None:
    compiler = Compiler()
    checks = GrammarChecks(compiler, deadline_s=60)
    for grammar in ("good", "other", "good"):
        await checks.check(SamplingParams(grammar=grammar))
    for _ in range(2):
        with pytest.raises(RequestRefused):
            await checks.check(SamplingParams(grammar="bad"))
    assert [grammar for grammar, _ in compiler.seen] == ["good", "other", "bad", "bad"]
    checks.close()


async def test_a_grammar_that_takes_too_long_is_refused_for_now() -> None:
    compiler = Compiler()
    compiler.going.clear()
    checks = GrammarChecks(compiler, deadline_s=0.01)
    with pytest.raises(RequestRefused, match=r"media\.prepare_s") as refusal:
        await checks.check(SamplingParams(grammar="slow"))
    assert refusal.value.status == 503
    compiler.going.set()
    checks.close()


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        (SamplingParams(grammar="x" * (GRAMMAR_BYTES_MAX + 1)), "invalid_grammar"),
        (SamplingParams(grammar="x", min_tokens=1), "invalid_grammar"),
        (SamplingParams(grammar="x", bad_words=((1,),)), "invalid_grammar"),
    ],
)
async def test_unbounded_values_and_masks_of_every_token_are_refused(
    sampling: SamplingParams, code: str
) -> None:
    compiler = Compiler()
    checks = GrammarChecks(compiler, deadline_s=60)
    with pytest.raises(RequestRefused, match="Remedy") as refusal:
        await checks.check(sampling)
    assert (refusal.value.code, refusal.value.status) == (code, 400)
    assert compiler.seen == []
    checks.close()


async def test_a_model_without_grammars_refuses_them_and_nothing_else() -> None:
    checks = GrammarChecks(None, deadline_s=60)
    await checks.check(SamplingParams())
    with pytest.raises(RequestRefused, match="structured output is not supported"):
        await checks.check(SamplingParams(grammar="x"))
    checks.close()
