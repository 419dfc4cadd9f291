"""Warm starts: one process per node imports the slow modules once; torchrun and workers are forked from it.

    NodeAgent ──► WarmHost (host.py) ──socket──► zygote.py ──fork──► torchrun ──exec──► stub.py, per rank
                      │                           ▲  │ ◄──abstract socket: "start this rank"──┘
                      └──► its owner (owner.py) ──┘  └──fork──► worker: its stub ends as it ends

Its owner starts the zygote and is its parent: the agent itself, or the process that starts the agent again.
Whatever an agent had forked ends with that agent. It is an accelerator and nothing else: whatever does not
fit (imports that fail, a second thread, a device that was touched, another environment) is refused with a
reason, and the caller starts plainly. It imports none of what it is told to import by name.
"""
