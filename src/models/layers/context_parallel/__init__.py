"""Context parallelism: several ranks compute one row, each a share of its positions."""
