"""`vsched bench cache`: the effect of caching embeddings per image."""
