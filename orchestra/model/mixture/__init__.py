"""Mixtures of experts, on one device: who is chosen, what experts compute, how they are evenly loaded."""
