"""Simulation on a virtual clock. A name is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.sim.channel import LinkProfile
    from vsched.sim.cluster import SimEngine
    from vsched.sim.cost import (
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
    from vsched.sim.deadlock import VirtualDeadlock
    from vsched.sim.faults import FaultPlan, random_plan
    from vsched.sim.generators import generate_workload
    from vsched.sim.html import render_html
    from vsched.sim.http import Client
    from vsched.sim.injection import Injector
    from vsched.sim.loop import VirtualLoop
    from vsched.sim.metrics import Targets
    from vsched.sim.network import Network
    from vsched.sim.outcome import Outcome
    from vsched.sim.plans import troubles_of
    from vsched.sim.report import comparison, write_csv, write_json
    from vsched.sim.run import simulate
    from vsched.sim.simulation import SimulationFailed
    from vsched.sim.swarm import swarm
    from vsched.sim.traces import TraceError, load_trace, save_trace
    from vsched.sim.troubles import EncodeFault, Outage, Pause, Slowness
    from vsched.sim.workload import Arrival, Image, Reply, Text, Workload, workload_of

__all__ = [
    "Arrival",
    "Client",
    "CostModel",
    "EncodeCost",
    "EncodeFault",
    "EncodeSample",
    "FaultPlan",
    "GenerateCost",
    "GenerateSample",
    "HostCost",
    "Image",
    "Injector",
    "LinkProfile",
    "Network",
    "Outage",
    "Outcome",
    "Pause",
    "Reply",
    "SimEngine",
    "SimulationFailed",
    "Slowness",
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
    "troubles_of",
    "workload_of",
    "write_csv",
    "write_json",
]
_MODULES = {
    "Arrival": "vsched.sim.workload",
    "Client": "vsched.sim.http",
    "CostModel": "vsched.sim.cost",
    "EncodeCost": "vsched.sim.cost",
    "EncodeFault": "vsched.sim.troubles",
    "EncodeSample": "vsched.sim.cost",
    "FaultPlan": "vsched.sim.faults",
    "GenerateCost": "vsched.sim.cost",
    "GenerateSample": "vsched.sim.cost",
    "HostCost": "vsched.sim.cost",
    "Image": "vsched.sim.workload",
    "Injector": "vsched.sim.injection",
    "LinkProfile": "vsched.sim.channel",
    "Network": "vsched.sim.network",
    "Outage": "vsched.sim.troubles",
    "Outcome": "vsched.sim.outcome",
    "Pause": "vsched.sim.troubles",
    "Reply": "vsched.sim.workload",
    "SimEngine": "vsched.sim.cluster",
    "SimulationFailed": "vsched.sim.simulation",
    "Slowness": "vsched.sim.troubles",
    "Targets": "vsched.sim.metrics",
    "Text": "vsched.sim.workload",
    "TraceError": "vsched.sim.traces",
    "VirtualDeadlock": "vsched.sim.deadlock",
    "VirtualLoop": "vsched.sim.loop",
    "Workload": "vsched.sim.workload",
    "comparison": "vsched.sim.report",
    "fit": "vsched.sim.cost",
    "generate_workload": "vsched.sim.generators",
    "load_cost_model": "vsched.sim.cost",
    "load_trace": "vsched.sim.traces",
    "random_plan": "vsched.sim.faults",
    "render_html": "vsched.sim.html",
    "save_cost_model": "vsched.sim.cost",
    "save_trace": "vsched.sim.traces",
    "simulate": "vsched.sim.run",
    "swarm": "vsched.sim.swarm",
    "troubles_of": "vsched.sim.plans",
    "workload_of": "vsched.sim.workload",
    "write_csv": "vsched.sim.report",
    "write_json": "vsched.sim.report",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
