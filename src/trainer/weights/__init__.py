"""Weights as Hugging Face keeps them: safetensors in a folder, read into sharded parameters and written from them."""
