"""`vsched tune`: the best split of cores among ranks, by measurement."""
