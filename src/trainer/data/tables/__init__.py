"""Files of rows with named columns, read by number: jsonl, parquet, and what Arrow makes of them."""
