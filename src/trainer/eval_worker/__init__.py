"""The command `eval-worker`: scores the snapshots of a training run on GPUs of its own."""
