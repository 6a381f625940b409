"""`vsched bench front`: what serving HTTP costs, measured with ranks that compute nothing."""
