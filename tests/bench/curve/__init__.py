"""Curves of requests per second over inter-token latency, for several step time limits, compared with peers."""
