"""`vsched bench lag`: event loop latency under the largest legal requests."""
