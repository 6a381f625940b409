"""The plan of a run: its schedule, learning rates and difficulty."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The settings that determine a run.

    Attributes:
        batch: Conversations per step.
        ramp: Steps over which the pictures get harder.
        opening: Steps over which the weight of the marks loss decreases.
        looking: Steps, from the first, of which only every fourth asks for answers. The others only find marks, in
            pictures that are full of them: a digit there costs a tenth, and answers require reading digits first.
        cooling: Share of the first round's steps, at its end, over which the learning rate decreases.
        again: Steps of a second round: the rate rises again, to `rewarmed` of its peak, and decreases; the pictures
            vary more than held-out ones (`docs/demo-model.md` has the reason).
        memory: Decay of the moving average of the weights per step.
        peak: The highest learning rate, of all parameters except the layers' matrices.
        matrix_peak: The highest learning rate of the layers' matrices.
        threads: Torch's threads; another number changes sums in the last bit.
    """

    seed: int = 0
    steps: int = 6500
    batch: int = 32
    threads: int = 2
    peak: float = 2e-3
    matrix_peak: float = 3e-3
    warmup: int = 100
    ramp: int = 800
    opening: int = 1600
    looking: int = 1200
    cooling: float = 0.4
    again: int = 1600
    rewarmed: float = 0.4
    varied: float = 1.1
    decay: float = 0.02
    clip: float = 1.0
    memory: float = 0.998

    @property
    def total(self) -> int:
        """The steps of both rounds."""
        return self.steps + self.again

    @property
    def plateau(self) -> int:
        """The step up to which nothing depends on the number of steps."""
        return int(self.steps * (1 - self.cooling))

    def rate(self, step: int) -> float:
        """Return the current share of the peak learning rates: a linear rise, a plateau, and a linear fall to zero."""
        if step < min(self.warmup, self.plateau):
            return (step + 1) / self.warmup
        if step >= self.steps:
            return self.rewarmed * (1 - (step - self.steps) / self.again)
        left = (self.steps - step) / max(1, self.steps - self.plateau)
        return min(1.0, left)

    def difficulty(self, step: int) -> float:
        """Return the maximum difficulty of a step's pictures: 0 to 1, and `varied` in the second round."""
        return self.varied if step >= self.steps else min(1.0, step / self.ramp)

    def mark_weight(self, step: int) -> float:
        """Return the weight of the marks loss, which dominates at the beginning."""
        return max(0.25, 1 - 0.75 * step / self.opening)

    def asks(self, step: int) -> bool:
        """Return whether a step asks for answers; otherwise it only finds marks."""
        return step % 4 == 0 or step >= self.looking
