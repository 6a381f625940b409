"""Random schedules: requests, events and fault plans drawn from seeds."""
