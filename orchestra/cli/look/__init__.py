"""The verbs that look at runs and change nothing: status, logs and why."""
