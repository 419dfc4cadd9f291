"""A run on disk: its paths, files, events, metrics, frozen configuration and requests. No torch."""
