"""What an image becomes before the tower sees it, as transformers' processor of the checkpoint has it."""
