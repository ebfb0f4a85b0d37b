"""`type = "sft"`: conversations as rows. Read, rendered, tokenised once into a cache, packed. See docs/data.md."""
