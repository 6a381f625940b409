"""Random batches of images stay within the memory reserved for the encoder."""
