"""`vsched tune`: find the best split of cores among ranks by measurement."""
