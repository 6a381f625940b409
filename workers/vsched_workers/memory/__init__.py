"""Device memory, and the batches that need the most of it."""
