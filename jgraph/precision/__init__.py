"""Matrix products in FP8."""
