"""`vsched bench memory`: memory policies under a hard limit."""
