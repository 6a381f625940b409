"""Decoding and processing of images: in processes that may crash, or in threads if there is no recipe for these."""
