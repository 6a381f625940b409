"""Products with quantized weights, which are dequantized or widened as they are read."""
