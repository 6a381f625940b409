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
    from vsched.sim.workload.requests import Arrival, Image, Reply, Text, Workload, workload_of
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
    "VirtualDeadlock",
    "VirtualLoop",
    "WorkerCrash",
    "Workload",
    "comparison",
    "fit",
    "generate_workload",
    "load_cost_model",
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
_MODULES = {
    "Arrival": "vsched.sim.workload.requests",
    "AsgiClient": "vsched.sim.network.asgi_client",
    "CostModel": "vsched.sim.cost.model",
    "DecodeError": "vsched.sim.faults.plan",
    "Disconnect": "vsched.sim.faults.plan",
    "EncodeCost": "vsched.sim.cost.model",
    "EncodeSample": "vsched.sim.cost.model",
    "FaultPlan": "vsched.sim.faults.plan",
    "FetchStall": "vsched.sim.faults.plan",
    "GenerateCost": "vsched.sim.cost.model",
    "GenerateSample": "vsched.sim.cost.model",
    "GroupOutage": "vsched.sim.faults.plan",
    "Hang": "vsched.sim.faults.plan",
    "HostCost": "vsched.sim.cost.model",
    "HostCrash": "vsched.sim.faults.plan",
    "HostCut": "vsched.sim.faults.plan",
    "HostLinkProfile": "vsched.sim.network.lane",
    "HostStall": "vsched.sim.faults.plan",
    "Image": "vsched.sim.workload.requests",
    "Injector": "vsched.sim.faults.injection",
    "LateHeartbeat": "vsched.sim.faults.plan",
    "LinkProfile": "vsched.sim.network.channel",
    "LostHeartbeat": "vsched.sim.faults.plan",
    "MessageFault": "vsched.sim.faults.plan",
    "MissedDecision": "vsched.sim.faults.plan",
    "Network": "vsched.sim.network.links",
    "OutOfMemory": "vsched.sim.faults.plan",
    "Partition": "vsched.sim.faults.plan",
    "ReplicaRestart": "vsched.sim.faults.plan",
    "Reply": "vsched.sim.workload.requests",
    "SimEngine": "vsched.sim.cluster",
    "SimulationFailed": "vsched.sim.invariants",
    "SimulationOutcome": "vsched.sim.fast.metrics",
    "SlowHostLink": "vsched.sim.faults.plan",
    "Slowdown": "vsched.sim.faults.plan",
    "Targets": "vsched.sim.fast.metrics",
    "Text": "vsched.sim.workload.requests",
    "TiePermutation": "vsched.sim.faults.plan",
    "TraceError": "vsched.sim.workload.traces",
    "VirtualDeadlock": "vsched.sim.loop.deadlock",
    "VirtualLoop": "vsched.sim.loop.virtual_loop",
    "WorkerCrash": "vsched.sim.faults.plan",
    "Workload": "vsched.sim.workload.requests",
    "comparison": "vsched.sim.report.comparison",
    "fit": "vsched.sim.cost.model",
    "generate_workload": "vsched.sim.workload.generators",
    "load_cost_model": "vsched.sim.cost.model",
    "load_trace": "vsched.sim.workload.traces",
    "random_plan": "vsched.sim.faults.plan",
    "render_html": "vsched.sim.report.rendering",
    "save_cost_model": "vsched.sim.cost.model",
    "save_trace": "vsched.sim.workload.traces",
    "simulate": "vsched.sim.fast.run",
    "small_config": "vsched.sim.cluster",
    "swarm": "vsched.sim.cluster.swarm",
    "workload_of": "vsched.sim.workload.requests",
    "write_csv": "vsched.sim.report.comparison",
    "write_json": "vsched.sim.report.comparison",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
