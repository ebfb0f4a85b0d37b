"""What reads the records of runs: `compare-runs` and `plot-runs`. See docs/reports.md."""
