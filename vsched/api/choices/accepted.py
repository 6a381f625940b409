"""Choices of one HTTP request, from acceptance to the end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.aio.streams.stream import OutputDelta
from vsched.api.contract import Generation
from vsched.api.formatters import usage_of
from vsched.api.metrics import RequestRecord
from vsched.api.responses import Usage


class Drawn(msgspec.Struct, frozen=True):
    """A complete choice."""

    generation: Generation
    deltas: list[OutputDelta]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, the criterion of `best_of`."""
        found = [one.logprob for delta in self.deltas for one in delta.logprobs or ()]
        return sum(found) / max(len(found), 1)

    @property
    def reported(self) -> int:
        """Number of prompt log-probabilities in its response."""
        report = self.generation.prompt_report
        return 0 if report is None else report.values


class AcceptedChoices:
    """Choices for all prompts of one HTTP request: prompt by prompt, the same number for each.

    The choices of one prompt are accepted together; if a later prompt is refused, those already accepted are aborted.
    """

    def __init__(self) -> None:
        self._families: list[Sequence[Generation]] = []

    def add(self, choices: Sequence[Generation]) -> None:
        """Add the choices of the next prompt."""
        self._families.append(choices)

    @property
    def generations(self) -> list[Generation]:
        """All choices in order."""
        return [one for choices in self._families for one in choices]

    @property
    def usage(self) -> Usage:
        """Usage so far; every generated choice counts, even if only the best ones are returned."""
        return usage_of(*self._families)

    def abort(self) -> None:
        """Abort all choices."""
        for generation in self.generations:
            generation.abort()

    async def whole(self, record: RequestRecord, *, best: int) -> list[Drawn]:
        """Wait for all choices and return the `best` of each prompt, most likely first; without selection, in order.

        Blocks: until the last one has ended; unread ones buffer their output.

        Raises:
            RequestFailed: If one ended in an error.
        """
        chosen: list[Drawn] = []
        index = 0
        for choices in self._families:
            drawn = []
            for generation in choices:
                deltas: list[OutputDelta] = []
                async for delta in generation:
                    record.output(index)
                    deltas.append(delta)
                drawn.append(Drawn(generation, deltas))
                index += 1
            if best < len(drawn):
                drawn = sorted(drawn, key=lambda one: -one.mean_logprob)[:best]
            chosen += drawn
        return chosen


def without_logprobs(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Remove log-probabilities, for a request that did not ask for them."""
    return [msgspec.structs.replace(delta, logprobs=None) for delta in deltas]


def answer_id(request_id: str, index: int) -> str:
    """Request id of a choice; a client's id cannot contain this separator."""
    return f"{request_id}#{index}" if index else request_id
