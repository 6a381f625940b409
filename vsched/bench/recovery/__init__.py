"""`vsched bench recovery`: the cost of a killed generate rank."""
