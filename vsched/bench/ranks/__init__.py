"""`vsched bench ranks`: the latency of a decision from leader to rank."""
