"""What runs on each node of a run: agents that meet, train one attempt after another, and end together."""
