"""Cost models: step durations and their calibration against a real engine."""
