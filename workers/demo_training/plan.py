"""The plan of a run: how long its parts are, and what a step learns from and how fast."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plan:
    """What fixes a run.

    Attributes:
        batch: Conversations a step.
        ramp: Steps over which the pictures get harder.
        opening: Steps over which finding the marks loses weight.
        looking: Steps, from the first, of which only every fourth asks for answers. The others find marks alone, in
            pictures that are full of them: a digit seen costs a tenth, and no answer is right before digits are.
        cooling: Share of the first round's steps, at its end, over which the learning rate falls.
        again: Steps of a second round after them: the rate is up again, to `rewarmed` of its peak, and falls; the
            pictures vary more than any that is held out (`docs/demo-model.md` says why).
        memory: How much of the averaged weights a step keeps.
        peak: The highest learning rate, of all that is no matrix of a layer.
        matrix_peak: That of the layers' matrices.
        threads: Torch's threads; sums come out differently, in the last bit, with another number.
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
        """The step up to which nothing depends on how many steps there are to be."""
        return int(self.steps * (1 - self.cooling))

    def rate(self, step: int) -> float:
        """Return the share of the learning rates' peaks: a linear rise, a plateau, and a linear fall to nothing."""
        if step < min(self.warmup, self.plateau):
            return (step + 1) / self.warmup
        if step >= self.steps:
            return self.rewarmed * (1 - (step - self.steps) / self.again)
        left = (self.steps - step) / max(1, self.steps - self.plateau)
        return min(1.0, left)

    def difficulty(self, step: int) -> float:
        """Return how hard the pictures are that a step may draw: 0 to 1, and `varied` in the second round."""
        return self.varied if step >= self.steps else min(1.0, step / self.ramp)

    def mark_weight(self, step: int) -> float:
        """Return the weight of finding the marks: it opens the eyes, then fades."""
        return max(0.25, 1 - 0.75 * step / self.opening)

    def asks(self, step: int) -> bool:
        """Return whether a step asks for answers; if not, it only looks."""
        return step % 4 == 0 or step >= self.looking

    def may_follow(self, other: Plan, step: int) -> bool:
        """Return whether this plan may go on from a step of another: nothing before it would have been different."""
        same = replace(other, steps=self.steps) == self
        return same and (other == self or step <= min(self.plateau, other.plateau))
