"""Bodies of requests: what they may hold, and how they are read."""
