"""The fast simulator: the production scheduler over groups that only model time."""
