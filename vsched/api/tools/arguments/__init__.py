"""The arguments of calls: from what a model writes to JSON, piece by piece."""
