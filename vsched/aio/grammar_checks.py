"""Checks the grammars of requests, in isolated processes, before the requests are accepted."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Protocol

import msgspec

from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.calls import (
    EXTERNAL_SIGNALS,
    RETRY_AFTER_S,
    CallFailedError,
    IsolatedCalls,
)
from vsched.types import ModelInfo, SamplingParams
from vsched.worker.contract import GRAMMAR_NOT_SUPPORTED, INVALID_GRAMMAR, supports
from vsched.worker.grammar_server import (
    CPU_S_MAX,
    MEMORY_BYTES_MAX,
    GrammarOutcome,
    GrammarSetup,
)
from vsched.worker.registry import load_worker

logger = logging.getLogger(__name__)

GRAMMAR_BYTES_MAX = 65_536
"""Maximum bytes of a grammar; the size of its compiled form is bounded by the limits of the compilation."""
GRAMMAR_REFUSALS = frozenset({INVALID_GRAMMAR, GRAMMAR_NOT_SUPPORTED})
SERVER_MODULE = "vsched.worker.grammar_server"
_THREADS = 2
_ACCEPTED_MAX = 1024
"""Maximum number of digests of accepted grammars: agents send the same tools with every request, and a check takes some
milliseconds."""


class GrammarChecker(Protocol):
    """Checks grammars; several threads may call it at once. See `GrammarProcesses`."""

    @property
    def pid(self) -> int: ...
    def check(self, grammar: str) -> None: ...
    def close(self) -> None: ...


class GrammarProcesses:
    """Checks each grammar in an isolated process, which may crash, loop or run out of memory."""

    def __init__(self, plugin: str, info: ModelInfo, *, deadline_s: float) -> None:
        """Prepare; the first check starts the server, which loads the grammar library for the model.

        Not earlier: for a vocabulary of 49,000 tokens that takes 0.6 s of CPU time and 52 MiB, and many servers
        never get a schema.
        """
        setup = msgspec.json.encode(GrammarSetup(plugin, info))
        self._calls = IsolatedCalls(
            SERVER_MODULE,
            setup,
            name="grammar",
            failure="the grammar could not be checked",
            code="grammar_failed",
        )
        self._deadline_s = deadline_s

    @property
    def pid(self) -> int:
        return self._calls.pid

    def check(self, grammar: str) -> None:
        """Compile a grammar.

        Blocks: until the check is done or its deadline has passed.

        Raises:
            RequestRefused: When the grammar cannot be used.
            RequestFailed: When it could not be checked.
        """
        try:
            outcome = self._calls.call(
                grammar.encode(),
                answer_type=GrammarOutcome,
                deadline_s=self._deadline_s,
                retry=True,
            )
        except CallFailedError as error:
            raise _failure(error, deadline_s=self._deadline_s) from None
        if outcome.message:
            raise RequestRefused(outcome.message, code=outcome.code)

    def close(self) -> None:
        self._calls.close()


def grammar_processes(config: Config, info: ModelInfo) -> GrammarProcesses | None:
    """Return the grammar checker of the generate stage; None if its plug-in has no grammars."""
    plugin = config.generate.plugin
    if not supports(load_worker(plugin, path="generate.plugin"), "load_grammars"):
        return None
    return GrammarProcesses(plugin, info, deadline_s=config.media.prepare_s)


def _failure(error: CallFailedError, *, deadline_s: float) -> RequestRefused | RequestFailed:
    if error.expired:
        return _late(deadline_s)
    if error.signal in EXTERNAL_SIGNALS:
        # For example by the kernel's OOM killer: the grammar may be valid.
        logger.error("the process of a grammar %s", error)
        message = f"the grammar could not be checked: its process {error}. Remedy: try again later."
        return RequestFailed(
            message, code="grammar_failed", status=503, retry_after_s=RETRY_AFTER_S
        )
    if error.signal is signal.SIGPROF:
        what = f"it took more than {CPU_S_MAX:g} s of CPU time to compile"
    else:
        logger.warning("a grammar was refused because the process that compiled it %s", error)
        what = (
            f"the process that compiled it {error}: it crashes the grammar library or takes more than "
            f"{MEMORY_BYTES_MAX >> 20} MiB"
        )
    return RequestRefused(
        f"the schema or grammar cannot be used: {what}. "
        "Remedy: simplify it: use fewer references, alternatives and levels, and smaller numbers.",
        code=INVALID_GRAMMAR,
    )


def _late(deadline_s: float) -> RequestRefused:
    limit = f"{deadline_s:g} s"
    return RequestRefused.of_limit(
        "the grammar could not be compiled in time",
        value=f"over {limit}",
        limit=limit,
        remedy="try again later, or raise media.prepare_s",
        code="prepare_timeout",
        status=503,
        retry_after_s=RETRY_AFTER_S,
    )


class GrammarChecks:
    """Checks grammars in two threads, so that one slow grammar does not delay all others."""

    def __init__(self, checker: GrammarChecker | None, *, deadline_s: float) -> None:
        """Take the checker; None if the plug-in has no grammars."""
        self._checker = checker
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars")
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    async def check_request(self, sampling: SamplingParams) -> None:
        """Refuse a request whose grammar cannot be used, if it has one.

        Blocks: up to the deadline.

        Raises:
            RequestRefused: With the reason and the remedy.
            RequestFailed: When the grammar could not be checked.
        """
        if not sampling.grammar:
            return
        checker = self._checker
        if checker is None:
            raise RequestRefused(
                "structured output is not supported for this model. Remedy: describe the format in the prompt.",
                code=GRAMMAR_NOT_SUPPORTED,
            )
        _check_bounds(sampling)
        digest = blake2b(sampling.grammar.encode(), digest_size=16).digest()
        if digest in self._accepted:
            self._accepted.move_to_end(digest)
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, checker.check, sampling.grammar)
        except TimeoutError:
            raise _late(self._deadline_s) from None
        self._accepted[digest] = None
        if len(self._accepted) > _ACCEPTED_MAX:
            self._accepted.popitem(last=False)

    @property
    def server_pid(self) -> int:
        return 0 if self._checker is None else self._checker.pid

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_bounds(sampling: SamplingParams) -> None:
    """Refuse oversized grammars, and parameters that could forbid every token together with a grammar."""
    size = len(sampling.grammar.encode())
    if size > GRAMMAR_BYTES_MAX:
        raise RequestRefused.of_limit(
            "the grammar is too large",
            value=f"{size} bytes",
            limit=f"{GRAMMAR_BYTES_MAX} bytes",
            remedy="send a smaller schema or grammar",
            code=INVALID_GRAMMAR,
        )
    for name, given in (("min_tokens", sampling.min_tokens), ("bad_words", sampling.bad_words)):
        if given:
            raise RequestRefused(
                f"`{name}` does not go with a grammar: together they could forbid every token. "
                "Remedy: send one of the two, or state the length in the grammar.",
                code=INVALID_GRAMMAR,
            )
