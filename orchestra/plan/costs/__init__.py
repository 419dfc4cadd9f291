"""What one case takes: peak memory by component and by stage, and the time of a step by part."""
