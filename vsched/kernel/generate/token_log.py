"""The log of tokens that running requests share."""

from __future__ import annotations

from array import array
from collections import deque


class TokenLog:
    """The token batches of past steps, kept as they came.

    A step appends its batch without looking into it, so the kernel's cost does not grow with the running requests.
    Only when a request leaves its slot are its tokens gathered, slot by slot, from the steps that it took part in.
    """

    def __init__(self) -> None:
        self._batches: deque[array[int]] = deque()
        self._first_step = 0

    def append(self, step: int, tokens: array[int]) -> None:
        """Keep the batch of a step; steps come without gaps."""
        if not self._batches:
            self._first_step = step
        assert step == self._first_step + len(self._batches), "a step's tokens are missing"
        self._batches.append(tokens)

    def gather(self, slot: int, first_step: int, last_step: int) -> array[int]:
        """Return the tokens of a slot over the steps [first_step, last_step]."""
        start = first_step - self._first_step
        stop = last_step - self._first_step + 1
        if start == 0 and stop == len(self._batches):
            return array("i", [batch[slot] for batch in self._batches])
        batches = self._batches
        return array("i", [batches[index][slot] for index in range(start, stop)])

    def forget_before(self, step: int) -> None:
        """Drop the batches that no running request needs any more."""
        while self._batches and self._first_step < step:
            self._batches.popleft()
            self._first_step += 1

    def clear(self) -> None:
        """Drop everything (the group starts anew)."""
        self._batches.clear()
