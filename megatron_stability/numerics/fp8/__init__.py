"""FP8: formats, recipes, statistics of what quantization did."""
