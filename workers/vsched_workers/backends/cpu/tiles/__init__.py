"""Products in tiles, on processors that have them (AMX): by weights in bfloat16, and by ones that become it."""
