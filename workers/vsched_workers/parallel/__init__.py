"""Several ranks that share one model: slicing, collectives, experts."""
