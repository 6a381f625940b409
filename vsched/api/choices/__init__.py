"""Several answers in one reply: to several prompts, several to one, and the best of some."""
