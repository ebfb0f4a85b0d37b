"""The dense decoder: llama, mistral, qwen2, qwen3, smollm3."""
