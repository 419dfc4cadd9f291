"""Members of a sweep that share a node: what keeps them at work, and what each agent asks of the job."""
