"""The answers to one HTTP request, from their acceptance to their end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.aio.streams.stream import OutputDelta
from vsched.api.contract import Generation
from vsched.api.formatters import usage_of
from vsched.api.metrics import RequestRecord
from vsched.api.responses import Usage


class Drawn(msgspec.Struct, frozen=True):
    """A whole answer."""

    generation: Generation
    deltas: list[OutputDelta]

    @property
    def mean_logprob(self) -> float:
        """The log-probability of a token of it at the mean, which is what the best answer has most of."""
        found = [one.logprob for delta in self.deltas for one in delta.logprobs or ()]
        return sum(found) / max(len(found), 1)

    @property
    def told(self) -> int:
        """How many log-probabilities of its prompt are told with it."""
        report = self.generation.prompt_report
        return 0 if report is None else report.values


class AcceptedAnswers:
    """The answers to the prompts of one HTTP request: prompt after prompt, as many to each.

    Those to one prompt were accepted together; what was accepted of a request is aborted with the rest of it.
    """

    def __init__(self) -> None:
        self._families: list[Sequence[Generation]] = []

    def add(self, answers: Sequence[Generation]) -> None:
        """Take the answers to the next prompt."""
        self._families.append(answers)

    @property
    def generations(self) -> list[Generation]:
        """All of them, in order."""
        return [one for answers in self._families for one in answers]

    @property
    def usage(self) -> Usage:
        """What they took so far; every answer that was drawn counts, also where the best alone is told."""
        return usage_of(*self._families)

    def abort(self) -> None:
        """Free all that they hold."""
        for generation in self.generations:
            generation.abort()

    async def whole(self, record: RequestRecord, *, best: int) -> list[Drawn]:
        """Wait for all, and return the `best` of each prompt, most likely first; all of them as they were drawn.

        Blocks: until the last has ended; those that are not read yet gather what comes.

        Raises:
            RequestFailed: When one ended in an error.
        """
        chosen: list[Drawn] = []
        index = 0
        for answers in self._families:
            drawn = []
            for generation in answers:
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
    """Return deltas as a request has them that did not ask for log-probabilities."""
    return [msgspec.structs.replace(delta, logprobs=None) for delta in deltas]


def answer_id(request_id: str, index: int) -> str:
    """Return the id of an answer of several: no client's id has such a sign."""
    return f"{request_id}#{index}" if index else request_id
