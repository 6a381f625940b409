"""`python -m tests.bench.parts pruning`: speed and accuracy of pruned videos."""
