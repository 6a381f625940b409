"""Several choices in one response: several prompts, `n` and `best_of`."""
