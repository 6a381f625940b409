"""A whole engine in simulation: all of vsched except the models, on a virtual clock, with faults and oracles."""

from vsched.sim.cluster.engine import SimEngine, groups_of, small_config
from vsched.sim.cluster.scenario import draw_scenario, run_scenario

__all__ = ["SimEngine", "draw_scenario", "groups_of", "run_scenario", "small_config"]
