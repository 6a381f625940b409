"""Print the digests of some scenarios; a process of its own for a test."""

from __future__ import annotations

import logging
import sys

from vsched.sim.cluster import draw_scenario, run_scenario

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for seed in range(int(sys.argv[1])):
        print(run_scenario(draw_scenario(seed)).digest)
    print(hash("a string"))
