"""`vsched simulate`: try configurations on a workload."""
