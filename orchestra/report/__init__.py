"""What a run's own records say about it. Reads files; `scheduler` alone asks Slurm."""
