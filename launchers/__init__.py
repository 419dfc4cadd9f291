"""Gets processes onto nodes, watches them and ends them; without torch, Hydra or orchestra.

    LaunchSpec ──► torchrun.command (pure) ──► NodeAgent (one per node) ──► Ending ──► the caller's verdict

spec, torchrun     what is started where; torchrun's command line and what it reports
node_agent         starts torchrun on one node, watches it, ends what is left of it
node_group         how the agents of a job know each other, agree, and notice who is gone
fork_server/       optional: torchrun and ranks forked from a process that has imported torch
memory_store/      optional: copies of the ranks' state in the memory of nodes
slurm/             what is asked of Slurm and told to it
processes, host_network   /proc; addresses and free ports

Linux only: processes are found through /proc and tied to their parents by PR_SET_PDEATHSIG.
"""
