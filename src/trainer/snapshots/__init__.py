"""`[eval_snapshots]`: weights that a training run leaves for `eval-worker`; see docs/validation.md."""
