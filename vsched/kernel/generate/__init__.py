"""The generate stage: the groups of ranks that hold the language model, as the kernel sees them."""
