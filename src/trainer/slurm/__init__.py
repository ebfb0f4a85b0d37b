"""A run as a SLURM job: the sbatch script from its template, and its way into the queue. See docs/slurm.md."""
