"""Kinds of held-out sets: each says where its windows lie, reads them, and makes metrics of their scores."""
