"""The verbs that look at runs and change nothing: status, logs, why and report."""
