"""Products and attention in tiles, on processors that have them (AMX)."""
