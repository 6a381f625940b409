"""Token streams to clients: detokenizing, stop strings, buffers, timing."""
