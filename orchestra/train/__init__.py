"""The data plane: what torchrun starts on every rank.

It reads the frozen configuration and writes the run directory. This module imports nothing: the wandb mirror
is imported through it and does without torch.
"""
