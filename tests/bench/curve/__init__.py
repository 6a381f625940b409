"""A curve: requests a second and pauses between tokens for several limits on a step, beside peers."""
