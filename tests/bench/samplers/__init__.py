"""What choosing tokens costs: vsched beside the samplers of peers, each in its own environment."""
