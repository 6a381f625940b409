"""Products by weights that are widened as they are read."""
