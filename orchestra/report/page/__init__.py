"""The page of `orchestra report`: its data as JSON from a run's records, and the one HTML file around it."""
