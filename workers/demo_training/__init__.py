"""Trains the small checkpoint that the demo and the accuracy benchmark use, on images that it draws itself."""
