"""Reading what jax traced."""
