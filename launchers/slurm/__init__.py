"""Everything that is said to Slurm and read from it: batch scripts, submissions, questions, a job's tasks.

submitit writes the script; it is imported only when one is rendered. Nothing here knows what the jobs do.
"""
