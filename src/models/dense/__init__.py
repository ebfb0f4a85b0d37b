"""The dense decoder: llama, qwen3."""
