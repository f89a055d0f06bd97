"""FP8 matmuls: the recipe, scaling, and the transform of a function."""
