"""Compiles the grammars of requests before they are accepted, off the event loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from vsched.errors import RequestRefused, limit_message
from vsched.types import SamplingParams
from vsched.worker.capabilities import Grammars

GRAMMAR_BYTES_MAX = 65_536
"""Bytes of a grammar; all that follows from one is bounded by the work it takes."""
INVALID, NOT_SUPPORTED = "invalid_grammar", "grammar_not_supported"
GRAMMAR_REFUSALS = frozenset({INVALID, NOT_SUPPORTED})


class GrammarChecks:
    """One thread: grammars that take long hold up each other and nobody else."""

    def __init__(self, grammars: Grammars | None, *, deadline_s: float) -> None:
        """Take what compiles them; None where the model can be held to none."""
        self._grammars = grammars
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._checked = self._refused = 0
        self._spent_s = self._longest_s = 0.0

    async def check(self, sampling: SamplingParams) -> None:
        """Refuse a request whose grammar cannot be used, if it has one.

        Blocks: up to the deadline, behind the grammars that came before.

        Raises:
            RequestRefused: With the reason and what to do.
        """
        if not sampling.grammar:
            return
        grammars = self._grammars
        if grammars is None:
            raise RequestRefused(
                "this model cannot be held to a grammar: that takes a tokenizer whose tokens are bytes, and an "
                "end token. Remedy: ask for the format in the prompt.",
                code=NOT_SUPPORTED,
            )
        _check_bounds(sampling)
        try:
            async with asyncio.timeout(self._deadline_s):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._compile, grammars, sampling.grammar)
        except TimeoutError:
            message = limit_message(
                "the grammar could not be compiled in time",
                value=f"over {self._deadline_s:g} s",
                limit=f"{self._deadline_s:g} s",
                remedy="try again later, or raise media.prepare_s",
            )
            raise RequestRefused(
                message, code="prepare_timeout", status=503, retry_after_s=5
            ) from None

    def statistics(self) -> dict[str, float]:
        """Return how many grammars were compiled, and the CPU time that took: a rank takes as long, once a request."""
        mean_ms = self._spent_s / max(self._checked, 1) * 1e3
        return {
            "compiled": self._checked,
            "refused": self._refused,
            "compile_ms": round(mean_ms, 3),
            "compile_ms_max": round(self._longest_s * 1e3, 3),
        }

    def _compile(self, grammars: Grammars, grammar: str) -> None:
        """Compile a grammar, in the thread."""
        started_s = time.thread_time()
        try:
            grammars.check(grammar)
        except RequestRefused:
            self._refused += 1
            raise
        finally:
            spent_s = time.thread_time() - started_s
            self._checked += 1
            self._spent_s += spent_s
            self._longest_s = max(self._longest_s, spent_s)

    def close(self) -> None:
        """Stop the thread; what waits for it is given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_bounds(sampling: SamplingParams) -> None:
    """Refuse what cannot be bounded, or what could leave no token to draw."""
    size = len(sampling.grammar.encode())
    if size > GRAMMAR_BYTES_MAX:
        message = limit_message(
            "the grammar is too large",
            value=f"{size} bytes",
            limit=f"{GRAMMAR_BYTES_MAX} bytes",
            remedy="send a smaller schema or grammar",
        )
        raise RequestRefused(message, code=INVALID)
    for name, given in (("min_tokens", sampling.min_tokens), ("bad_words", sampling.bad_words)):
        if given:
            raise RequestRefused(
                f"`{name}` does not go with a grammar: together they could forbid every token. "
                "Remedy: send one of the two, or state the length in the grammar.",
                code=INVALID,
            )
