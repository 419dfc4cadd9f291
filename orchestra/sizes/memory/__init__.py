"""Bytes that a rank of orchestra's trainer takes, in closed form, without torch."""
