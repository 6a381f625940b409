"""`vsched bench recovery`: cost of a killed generate rank."""
