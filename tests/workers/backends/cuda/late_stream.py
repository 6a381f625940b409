"""A fake graph stream that runs work late, when something waits for it, as a GPU may."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vsched_workers.backends.cuda.graphs import Act, Run


class LateStream:
    """Runs work in order, but only on a wait for it or for later work.

    So code that overwrites a copy's source too early, or reads its target too early, fails here.

    Attributes:
        starts: Number of captured steps that were started.
        uploads: Number of copies to the device.
        failure: Raised in place of a capture.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.uploads = 0
        self.failure: Exception | None = None
        self.forgotten = 0
        self._late: list[Act] = []
        self._done = 0

    def host(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        self.uploads += 1
        return self._later(lambda: target.copy_(source))

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        return self._later(lambda: target.copy_(source))

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        result = run()
        run()

        def replay() -> None:
            result.copy_(run())

        return replay, result

    def start(self, replay: Act) -> None:
        self.starts += 1
        self._later(replay)

    def wait_for_others(self) -> None:
        """Others run at once."""

    def let_others_wait(self) -> None:
        self._run_until(len(self._late))

    def forget(self) -> None:
        self._run_until(len(self._late))
        self.forgotten += 1

    def _later(self, act: Callable[[], object]) -> Act:
        self._late.append(lambda: (act(), None)[1])
        place = len(self._late)
        return lambda: self._run_until(place)

    def _run_until(self, place: int) -> None:
        while self._done < place:
            self._late[self._done]()
            self._done += 1
