"""What a run does about failures: what happened, what is decided, what it costs."""
