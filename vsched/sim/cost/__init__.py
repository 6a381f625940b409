"""Cost models: how long steps take, and how that is calibrated against a real engine."""
