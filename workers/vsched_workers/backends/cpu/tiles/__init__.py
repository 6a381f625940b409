"""Products in tiles, on processors that have them (AMX)."""
