"""Arithmetic on integers: layouts, hardware, FLOPs, bytes, intervals. No torch, no files of a run."""
