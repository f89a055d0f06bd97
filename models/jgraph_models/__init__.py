"""Flax NNX models for jgraph: a GPT that covers Llama 3, Qwen and Mixtral, with presets and Hugging Face folders."""
