"""The data plane: what torchrun starts on every rank. It reads the frozen configuration and writes the run directory."""
