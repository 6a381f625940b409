"""A whole engine in simulation: all of vsched except the models, on a virtual clock, with faults and oracles."""

from vsched.sim.cluster.client_sessions import ClientBehaviour, ClientSession
from vsched.sim.cluster.engine import SimEngine, groups_of, small_config
from vsched.sim.cluster.scenario import Scenario, ScenarioReport, draw_scenario, run_scenario
from vsched.sim.world import Delays, World

__all__ = [
    "ClientBehaviour",
    "ClientSession",
    "Delays",
    "Scenario",
    "ScenarioReport",
    "SimEngine",
    "World",
    "draw_scenario",
    "groups_of",
    "run_scenario",
    "small_config",
]
