"""The rank side: follow the decision log, keep slots and sequences, hand batches to a worker plug-in."""
