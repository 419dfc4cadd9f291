"""Everything that is said to Slurm and read from it: batch scripts, submissions, questions, a job's tasks."""
