"""The workers on a GPU, beside what the GPU could do."""
