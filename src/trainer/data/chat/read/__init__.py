"""Conversations out of files and datasets, in one form."""
