"""Conversations to text, and which parts of it carry loss."""
