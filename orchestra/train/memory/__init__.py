"""What a rank's memory takes: counted before a run, fitted at its start, explained when it runs out."""
