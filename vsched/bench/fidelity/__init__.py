"""`vsched bench fidelity`: accuracy of simulations compared with a real engine, and calibration."""
