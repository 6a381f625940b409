"""`vsched bench fidelity`: the distance between a simulation and the engine it stands for, and calibration."""
