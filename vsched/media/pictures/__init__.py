"""Decoding and processing of images: in a thread, or in a process of its own where an image is large."""
