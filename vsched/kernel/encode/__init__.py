"""The encode stage: the items that wait for an encoder, the encode groups, and the embedding cache."""
