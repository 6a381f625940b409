"""The gallery: effects of policies on small workloads in the simulator."""
