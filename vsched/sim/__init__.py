"""Simulation on a virtual clock. A name is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.sim.cluster import SimEngine
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
    from vsched.sim.faults.plan import FaultPlan, random_plan
    from vsched.sim.invariants import SimulationFailed
    from vsched.sim.loop.deadlock import VirtualDeadlock
    from vsched.sim.loop.virtual_loop import VirtualLoop
    from vsched.sim.network.asgi_client import AsgiClient
    from vsched.sim.network.channel import LinkProfile
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
    "EncodeCost",
    "EncodeSample",
    "FaultPlan",
    "GenerateCost",
    "GenerateSample",
    "HostCost",
    "Image",
    "Injector",
    "LinkProfile",
    "Network",
    "Reply",
    "SimEngine",
    "SimulationFailed",
    "SimulationOutcome",
    "Targets",
    "Text",
    "TraceError",
    "VirtualDeadlock",
    "VirtualLoop",
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
    "swarm",
    "workload_of",
    "write_csv",
    "write_json",
]
_MODULES = {
    "Arrival": "vsched.sim.workload.requests",
    "AsgiClient": "vsched.sim.network.asgi_client",
    "CostModel": "vsched.sim.cost.model",
    "EncodeCost": "vsched.sim.cost.model",
    "EncodeSample": "vsched.sim.cost.model",
    "FaultPlan": "vsched.sim.faults.plan",
    "GenerateCost": "vsched.sim.cost.model",
    "GenerateSample": "vsched.sim.cost.model",
    "HostCost": "vsched.sim.cost.model",
    "Image": "vsched.sim.workload.requests",
    "Injector": "vsched.sim.faults.injection",
    "LinkProfile": "vsched.sim.network.channel",
    "Network": "vsched.sim.network.links",
    "SimulationOutcome": "vsched.sim.fast.metrics",
    "Reply": "vsched.sim.workload.requests",
    "SimEngine": "vsched.sim.cluster",
    "SimulationFailed": "vsched.sim.invariants",
    "Targets": "vsched.sim.fast.metrics",
    "Text": "vsched.sim.workload.requests",
    "TraceError": "vsched.sim.workload.traces",
    "VirtualDeadlock": "vsched.sim.loop.deadlock",
    "VirtualLoop": "vsched.sim.loop.virtual_loop",
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
    "swarm": "vsched.sim.cluster.swarm",
    "workload_of": "vsched.sim.workload.requests",
    "write_csv": "vsched.sim.report.comparison",
    "write_json": "vsched.sim.report.comparison",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
