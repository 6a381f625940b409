"""`python -m tests.bench.parts cache`: the effect of caching embeddings per image."""
