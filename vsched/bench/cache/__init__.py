"""`vsched bench cache`: the worth of caching embeddings by item."""
