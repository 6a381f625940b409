"""Model ranks: stand-ins that execute decisions on symbolic memory and check everything they read."""
