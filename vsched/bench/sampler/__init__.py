"""What choosing tokens costs, by what requests ask for."""
