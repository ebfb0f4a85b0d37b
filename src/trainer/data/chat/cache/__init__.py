"""Conversations tokenised once, in parallel, and kept in Arrow files."""
