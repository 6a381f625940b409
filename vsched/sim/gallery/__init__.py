"""The gallery: what policies do to small workloads, in the simulator."""
