"""Text generation with a trained model: `generate`, `stream`, and incremental decoding of tokens to text."""
