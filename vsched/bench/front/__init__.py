"""`vsched bench front`: cost of serving HTTP, measured with ranks that compute nothing."""
