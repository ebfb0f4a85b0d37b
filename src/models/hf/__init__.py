"""Causal language models of transformers behind our interface, with exact document isolation or a refusal."""
