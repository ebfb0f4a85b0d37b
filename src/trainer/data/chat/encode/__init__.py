"""Text to tokens, and which of them carry loss."""
