"""Simulation on a virtual clock. Each name is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.sim.cluster import SimEngine, small_config
    from vsched.sim.cluster.swarm import swarm
    from vsched.sim.cost.model import (
        CostModel,
        EncodeCost,
        EncodeSample,
        GenerateCost,
        GenerateSample,
        HostCost,
        fit,
        load_cost_model,
        save_cost_model,
    )
    from vsched.sim.fast.metrics import SimulationOutcome, Targets
    from vsched.sim.fast.recorded import RecordedRun, load_record
    from vsched.sim.fast.run import simulate
    from vsched.sim.faults.injection import Injector
    from vsched.sim.faults.plan import (
        DecodeError,
        Disconnect,
        FaultPlan,
        FetchStall,
        GroupOutage,
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
        random_plan,
    )
    from vsched.sim.invariants import SimulationFailed
    from vsched.sim.loop.deadlock import VirtualDeadlock
    from vsched.sim.loop.virtual_loop import VirtualLoop
    from vsched.sim.network.asgi_client import AsgiClient
    from vsched.sim.network.channel import LinkProfile
    from vsched.sim.network.lane import HostLinkProfile
    from vsched.sim.network.links import Network
    from vsched.sim.report.comparison import comparison, write_csv, write_json
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
    "AsgiClient",
    "CostModel",
    "DecodeError",
    "Disconnect",
    "EncodeCost",
    "EncodeSample",
    "FaultPlan",
    "FetchStall",
    "GenerateCost",
    "GenerateSample",
    "GroupOutage",
    "Hang",
    "HostCost",
    "HostCrash",
    "HostCut",
    "HostLinkProfile",
    "HostStall",
    "Image",
    "Injector",
    "LateHeartbeat",
    "LinkProfile",
    "LostHeartbeat",
    "MessageFault",
    "MissedDecision",
    "Network",
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
    "VirtualDeadlock",
    "VirtualLoop",
    "WorkerCrash",
    "Workload",
    "comparison",
    "fit",
    "generate_workload",
    "load_cost_model",
    "load_record",
    "load_trace",
    "random_plan",
    "render_html",
    "save_cost_model",
    "save_trace",
    "simulate",
    "small_config",
    "swarm",
    "workload_of",
    "write_csv",
    "write_json",
]
_NAMES = {
    "cluster": "SimEngine small_config",
    "cluster.swarm": "swarm",
    "cost.model": (
        "CostModel EncodeCost EncodeSample GenerateCost GenerateSample HostCost fit "
        "load_cost_model save_cost_model"
    ),
    "fast.metrics": "SimulationOutcome Targets",
    "fast.recorded": "RecordedRun load_record",
    "fast.run": "simulate",
    "faults.injection": "Injector",
    "faults.plan": (
        "DecodeError Disconnect FaultPlan FetchStall GroupOutage Hang HostCrash HostCut "
        "HostStall LateHeartbeat LostHeartbeat MessageFault MissedDecision OutOfMemory "
        "Partition ReplicaRestart SlowHostLink Slowdown TiePermutation WorkerCrash random_plan"
    ),
    "invariants": "SimulationFailed",
    "loop.deadlock": "VirtualDeadlock",
    "loop.virtual_loop": "VirtualLoop",
    "network.asgi_client": "AsgiClient",
    "network.channel": "LinkProfile",
    "network.lane": "HostLinkProfile",
    "network.links": "Network",
    "report.comparison": "comparison write_csv write_json",
    "report.rendering": "render_html",
    "workload.generators": "generate_workload",
    "workload.requests": "Arrival Image Reply Text Video Workload workload_of",
    "workload.traces": "TraceError load_trace save_trace",
}
_MODULES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
