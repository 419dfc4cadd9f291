"""The data plane: what torchrun starts on every rank.

It reads the frozen configuration and writes the run directory. Empty on purpose: the wandb mirror, which has
no use for torch, is imported through here.
"""
