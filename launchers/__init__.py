"""Gets processes onto nodes and keeps them there. Knows no torch, no Hydra and nothing of orchestra.

    LaunchSpec ──► torchrun.command (pure) ──► NodeAgent (one per node) ──► Ending ──► a verdict the caller
    computes

Linux only: processes are found through /proc and tied to their parents by PR_SET_PDEATHSIG.
"""
