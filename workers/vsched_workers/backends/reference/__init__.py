"""The reference backend: transformers' layers as they are, on torch alone."""
