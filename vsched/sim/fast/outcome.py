"""What comes of a simulation."""

from __future__ import annotations

import msgspec

from vsched.sim.report.metrics import Series, SimulationFigures, Targets


class SimulationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a simulation.

    Attributes:
        label: What tables and legends call it.
        policies: The policy of each table, with its fields.
        groups: How many encode and generate groups there are.
        scaled_down: Images that were larger than an image may be.
        events: Events that the scheduler heard.
        digest: Over all that the scheduler decided, and when: equal for equal decisions.
        wall_s: What the simulation took, of real time.
        cdf: Points (milliseconds, share of all at most so long) of `ttft`, `itl`, `tpot` and `e2e`.
    """

    label: str
    workload: str
    seed: int
    cost: str
    targets: Targets
    policies: dict[str, str]
    groups: tuple[int, int]
    scaled_down: int
    events: int
    digest: str
    wall_s: float
    figures: SimulationFigures
    series: Series
    cdf: dict[str, list[tuple[float, float]]]
