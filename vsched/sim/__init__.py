"""Simulation on a virtual clock. Each name is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.sim.cluster import SimEngine, small_config
    from vsched.sim.cost.model import CostModel, load_cost_model
    from vsched.sim.fast.groups import GroupOutage
    from vsched.sim.fast.metrics import SimulationOutcome, Targets
    from vsched.sim.fast.recorded import RecordedRun, load_record
    from vsched.sim.fast.simulation import simulate
    from vsched.sim.faults import (
        DecodeError,
        Disconnect,
        FaultPlan,
        FetchStall,
        Hang,
        HostCrash,
        HostCut,
        HostStall,
        LateHeartbeat,
        LostHeartbeat,
        MessageFault,
        MissedDecision,
        OutOfMemory,
        Partition,
        ReplicaRestart,
        Slowdown,
        SlowHostLink,
        TiePermutation,
        WorkerCrash,
    )
    from vsched.sim.invariants import SimulationFailed
    from vsched.sim.network.links import HostLinkProfile, LinkProfile
    from vsched.sim.report.comparison import comparison, write_json
    from vsched.sim.report.rendering import render_html
    from vsched.sim.workload.generators import generate_workload
    from vsched.sim.workload.requests import (
        Arrival,
        Image,
        Reply,
        Text,
        Video,
        Workload,
        workload_of,
    )
    from vsched.sim.workload.traces import TraceError, load_trace, save_trace

__all__ = [
    "Arrival",
    "CostModel",
    "DecodeError",
    "Disconnect",
    "FaultPlan",
    "FetchStall",
    "GroupOutage",
    "Hang",
    "HostCrash",
    "HostCut",
    "HostLinkProfile",
    "HostStall",
    "Image",
    "LateHeartbeat",
    "LinkProfile",
    "LostHeartbeat",
    "MessageFault",
    "MissedDecision",
    "OutOfMemory",
    "Partition",
    "RecordedRun",
    "ReplicaRestart",
    "Reply",
    "SimEngine",
    "SimulationFailed",
    "SimulationOutcome",
    "SlowHostLink",
    "Slowdown",
    "Targets",
    "Text",
    "TiePermutation",
    "TraceError",
    "Video",
    "WorkerCrash",
    "Workload",
    "comparison",
    "generate_workload",
    "load_cost_model",
    "load_record",
    "load_trace",
    "render_html",
    "save_trace",
    "simulate",
    "small_config",
    "workload_of",
    "write_json",
]
_NAMES = {
    "cluster": "SimEngine small_config",
    "cost.model": "CostModel load_cost_model",
    "fast.groups": "GroupOutage",
    "fast.metrics": "SimulationOutcome Targets",
    "fast.recorded": "RecordedRun load_record",
    "fast.simulation": "simulate",
    "invariants": "SimulationFailed",
    "network.links": "HostLinkProfile LinkProfile",
    "report.comparison": "comparison write_json",
    "report.rendering": "render_html",
    "workload.generators": "generate_workload",
    "workload.requests": "Arrival Image Reply Text Video Workload workload_of",
    "workload.traces": "TraceError load_trace save_trace",
}
"""Names by their modules; all others are in `faults`."""
_MODULES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, f"{__name__}.faults")), name)
