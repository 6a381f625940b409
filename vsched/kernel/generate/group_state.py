"""What a snapshot holds of a generate group."""

from __future__ import annotations

import msgspec

from vsched.kernel.generate.blocks import BlockPoolState
from vsched.kernel.generate.drafts import DraftGrantsState
from vsched.kernel.generate.in_flight import InFlightState
from vsched.kernel.generate.measures import MeasuresState
from vsched.kernel.generate.running import RunningSetState
from vsched.kernel.generate.snapshots import StateSnapshotsState
from vsched.kernel.generate.step_budget import StepTimeState
from vsched.kernel.generate.swap_space import SwapSpaceState
from vsched.kernel.groups import Status

COUNTED = (
    *("tokens_prefilled", "tokens_decoded", "tokens_cached", "preemptions", "admitted"),
    *("tokens_drafted", "drafts_accepted"),
    *("swapped_out", "swapped_in", "swap_blocks_out", "swap_blocks_in"),
)
"""What a group counts, by the names of its statistics."""


class GenerateGroupState(msgspec.Struct):
    """The state of a `GenerateGroup`; its requests know by themselves that they are its own, and which ones wait."""

    status: Status
    in_flight: InFlightState
    running: RunningSetState
    pool: BlockPoolState
    drafts: DraftGrantsState
    snapshots: StateSnapshotsState | None
    swap: SwapSpaceState
    step_times: StepTimeState
    measures: MeasuresState
    counts: dict[str, int]
    quarantined: int
    front_first: bool
    blocked: bool
    hold_until_ns: int | None
