"""FP8 matmuls: the recipe, the scales, and the transform that computes the matmuls of a function in FP8."""
