"""A step of decode rows through all layers in one call of compiled code, which calls the kernels by their addresses."""
