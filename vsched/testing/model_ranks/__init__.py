"""Model ranks: stand-ins that follow decisions over symbolic memory and check what they read."""
