"""Training of the small checkpoint for the demo and the accuracy benchmark, on generated images."""
