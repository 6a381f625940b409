"""`vsched bench ranks`: latency of a decision from leader to rank."""
