"""Decoding and processing of images: in isolated processes, or in threads if the preprocessor has no recipe."""
