"""Whether random batches of images stay within what was reserved for the encoder."""
