"""The workers on a GPU, compared with its limits."""
