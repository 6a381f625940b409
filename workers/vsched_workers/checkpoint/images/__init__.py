"""Image processing with the transformers processor of a checkpoint."""
