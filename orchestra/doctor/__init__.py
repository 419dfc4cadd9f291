"""Checks a machine and a cluster before anybody trains there. It changes nothing; no check can end it."""
